"""One streamed Completion as the API reads it: its pieces in order, and then what it came to.

Redis brings pieces and says quickly that there will be no more; Postgres says what the end was.
An end that is no success, a piece that is missing and a Redis that lost them raise the error that
the client is to see. Whoever holds a feed closes it: its client may have left, and the worker
aborts what nobody reads. What went wrong here is no client that left: `fail` it, and it is free.
"""

import asyncio
import contextlib
from typing import Any, TypeAlias
from uuid import UUID

import orjson
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request

from app.completions.intake import PreparedCompletion
from app.completions.line import BROKER_ERRORS, FIRST_KEY
from app.completions.records import fail_completion, withdraw_completion
from app.completions.states import CompletionState
from app.completions.unlisted import UnlistedCompletion
from app.completions.waiting import (
    BELL_SECONDS,
    DATABASE_AWAY,
    LOOK_SECONDS,
    NO_BROKER,
    ClientLeftError,
    Desk,
    Lookout,
    Presence,
    error_of,
)
from app.errors import ApiError, RequestTimeoutError

# A worker that missed its reader, or was told that it left, sets no mark at the end.
NOT_READ = (
    "The stream was not read in time: what is made has to be taken within a minute after its last "
    "token. It is charged like one that is left. Read faster, or ask for fewer logprobs or tokens, "
    "or send it as a Job."
)
BIG_BYTES = 64 * 1024  # of pieces: what takes longer must not hold the event loop up

Piece: TypeAlias = dict[str, Any]


class TokenFeed:
    """Gives the pieces of a Completion that was submitted; `close` it in any case."""

    def __init__(self, desk: Desk, prepared: PreparedCompletion | UnlistedCompletion) -> None:
        """Begin to be its reader; call it on the event loop."""
        self._desk = desk
        self._id: UUID = prepared.id
        self._after = FIRST_KEY
        self._next_number = 0
        self._tokens = 0
        self._was_told = False  # that the end has come
        self._has_succeeded = False
        self._is_over = False
        self._has_failed = False
        self._lookout = Lookout(desk, self._id)
        self.was_big = False  # the last pieces: writing them takes a moment
        self._loop = asyncio.get_running_loop()
        self._quiet_since = self._loop.time()
        self._presence = Presence(desk.bell, self._id)

    async def first(self, request: Request) -> list[Piece]:
        """Wait for the first pieces.

        Raises the ApiError of a Completion that has failed before them, and ClientLeftError.
        """
        while True:
            if await request.is_disconnected():
                raise ClientLeftError
            pieces = await self.poll()
            if pieces is None:
                raise self._lost()  # a success without a single token
            if pieces:
                return pieces

    async def poll(self) -> list[Piece] | None:
        """Wait a moment for pieces; [] when there are none yet, None after the last.

        Raises the ApiError of a Completion that has failed.
        """
        try:
            entries = await self._desk.bell.read_tokens(
                self._id,
                self._after,
                0 if self._was_told or self._has_succeeded else BELL_SECONDS,
            )
        except BROKER_ERRORS:
            entries = []
            if self._has_succeeded:
                raise self._lost() from None
            await asyncio.sleep(BELL_SECONDS)
        pieces: list[Piece] = []
        self.was_big = sum(len(entry.pieces) for entry in entries) > BIG_BYTES
        for entry in entries:
            self._after = entry.key
            self._was_told = self._was_told or entry.is_end
            if not entry.is_end:
                await self._check(entry.number)
                if self.was_big:
                    pieces += await run_in_threadpool(orjson.loads, entry.pieces)
                else:
                    pieces += orjson.loads(entry.pieces)
        now = self._loop.time()
        if pieces:
            # Whatever the end is, these come before it.
            self._quiet_since = now
            self._tokens += sum(len(piece["token_ids"]) for piece in pieces)
        elif self._has_succeeded:
            return None
        elif self._was_told or now - self._quiet_since >= LOOK_SECONDS:
            self._quiet_since = now
            await self._look()
        return pieces

    async def last(self) -> list[dict[str, Any]]:
        """Read what follows the pieces: for each prompt `completion_tokens` and `captures`.

        Raises ApiError when it, or some of the pieces, got lost.
        """
        try:
            answer = await run_in_threadpool(self._desk.line.read_answer, self._id)
        except BROKER_ERRORS:
            answer = None
        if answer is None:
            raise self._lost()
        ends: list[dict[str, Any]] = await run_in_threadpool(orjson.loads, answer)
        if sum(end["completion_tokens"] for end in ends) != self._tokens:
            raise self._lost()
        return ends

    async def fail(self) -> None:
        """End what is not over, because its client was told an error of ours: it costs nothing.

        The worker ends it likewise where Postgres cannot be reached from here.
        """
        if self._is_over or self._has_failed:
            return
        self._has_failed = True
        await asyncio.shield(self._end_failed())

    async def _end_failed(self) -> None:
        with contextlib.suppress(Exception):
            await self._presence.leave(failed=True)
        with contextlib.suppress(Exception):
            await self._desk.try_once(lambda conn: fail_completion(conn, self._id, NO_BROKER))
            self._is_over = True

    async def close(self) -> None:
        """Stop reading: what is not over is aborted and charged by its worker, or withdrawn."""
        self._presence.end()
        with contextlib.suppress(Exception):
            await asyncio.shield(self._leave())

    async def _leave(self) -> None:
        if self._has_failed:
            return
        with contextlib.suppress(*BROKER_ERRORS):
            await self._presence.leave()
        if not self._is_over:
            await self._desk.try_once(lambda conn: withdraw_completion(conn, self._id))

    async def _look(self) -> None:
        """Look into Postgres; note a success, raise the error of any other end."""
        try:
            ending = await self._lookout.look()
        except DATABASE_AWAY:
            if self._next_number == 0:
                raise
            return  # what has begun goes on as soon as Postgres is back
        if ending is None or not ending.is_final:
            return
        self._is_over = True
        if ending.failure is not None:
            raise error_of(ending.failure)
        if ending.state is CompletionState.cancelled and self._was_told:
            raise RequestTimeoutError(NOT_READ, code="stream_not_read")
        if ending.state is not CompletionState.succeeded:
            raise self._lost()  # the worker saw no reader for seconds: Redis forgot it
        self._has_succeeded = True

    async def _check(self, number: int) -> None:
        """Make sure that no entry is missing; without it the text would be another."""
        if number != self._next_number:
            await self.fail()
            raise self._lost()
        self._next_number += 1

    def _lost(self) -> ApiError:
        return error_of(NO_BROKER)
