"""Sends a streamed Completion as server-sent events.

The status is sent once the first tokens are there. From then on a failure is an event `error`
without `[DONE]` after it; `[DONE]` comes only after everything else, when the Completion counts.
A client that leaves, or takes nothing for a minute, ends its Completion.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import orjson
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from app.completions.intake import PreparedCompletion
from app.completions.stream import Piece, TokenFeed
from app.completions.stream_chunks import ChunkWriter, WrittenChunks
from app.completions.unlisted import UnlistedCompletion
from app.completions.waiting import ClientLeftError, Desk
from app.errors import ApiError
from app.kit.request_id import request_id_of

log = logging.getLogger(__name__)

Writer: TypeAlias = ChunkWriter | WrittenChunks

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
KEEP_ALIVE_SECONDS = 10.0  # of silence, between two comments
CANCEL_SECONDS = 0.1  # between two tries to end what was begun
CLIENT_SECONDS = 60.0  # that a client may take nothing of what is there for it


async def stream_answer(
    request: Request,
    desk: Desk,
    prepared: PreparedCompletion | UnlistedCompletion,
    make_writer: Callable[[], Writer],
    *,
    on_close: Callable[[], None],
) -> Response:
    """Wait for the first tokens of a Completion that was submitted, and answer with all of them.

    `on_close` is called when the answer has been sent or the client has left. Raises, without
    calling it, the ApiError of a Completion that failed before, and ClientLeftError.
    """
    feed = TokenFeed(desk, prepared)
    try:
        first = await feed.first(request)
        return CompletionStream(feed, make_writer(), first, on_close)
    except ClientLeftError:
        await feed.close()
        raise
    except Exception:
        await feed.fail()
        await feed.close()
        raise
    except BaseException:
        await feed.close()
        raise


class CompletionStream(Response):
    """The answer; whatever becomes of it, its feed is closed."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        feed: TokenFeed,
        writer: Writer,
        first: Sequence[Piece],
        on_close: Callable[[], None],
    ) -> None:
        """Answer 200; nothing is sent before the server asks for it."""
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type=MEDIA_TYPE,
        )
        del self.headers["content-length"]
        self._feed = feed
        self._writer = writer
        self._first = first
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client leaves."""
        sending = asyncio.ensure_future(self._send_all(scope, send))
        leaving = asyncio.ensure_future(_client_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancelled(sending, leaving)
            try:
                await self._feed.close()
            finally:
                self._on_close()
        if not sending.cancelled():
            sending.result()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        with contextlib.suppress(TimeoutError):  # it takes nothing any more: it has left
            try:
                await self._send_chunks(send)
            except ApiError as error:
                await self._feed.fail()
                await _send(send, _error_event(scope, error))
            except TimeoutError:
                raise
            except Exception:
                await self._feed.fail()
                log.exception("a stream broke", extra={"request_id": request_id_of(scope)})
                ours = ApiError("Something went wrong here. Tell the operator the request_id.")
                await _send(send, _error_event(scope, ours))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_chunks(self, send: Send) -> None:
        pieces: Sequence[Piece] | None = self._first
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        while pieces is not None:
            if self._feed.was_big:
                body = await run_in_threadpool(self._events, pieces)
            else:
                body = self._events(pieces)
            if not body and loop.time() - sent_at > KEEP_ALIVE_SECONDS:
                body = KEEP_ALIVE
            if body:
                await _send(send, body)
                sent_at = loop.time()
            pieces = await self._feed.poll()
        last = self._writer.last(await self._feed.last())
        body = b"" if last is None else await run_in_threadpool(_event, last)
        await _send(send, body + DONE)

    def _events(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(map(_event, self._writer.write(pieces)))


def _event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _error_event(scope: Scope, error: ApiError) -> bytes:
    return _event(error.envelope(request_id_of(scope)))


async def _send(send: Send, body: bytes) -> None:
    """Send a part of the body. Raises TimeoutError when the client does not take it."""
    async with asyncio.timeout(CLIENT_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _cancelled(*tasks: "asyncio.Future[None]") -> None:
    """Cancel tasks until they end: a cancel may be swallowed where Redis is being asked."""
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_SECONDS)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
