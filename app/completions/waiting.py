"""One Completion from its Hold to its answer: store, put in line, wait, read.

Redis says quickly that the end has come; Postgres says what the end was, and is looked at every
second besides, so that a lost message, worker or broker costs seconds and not the deadline. A
client that leaves takes its Completion along.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import anyio
import anyio.to_thread
import orjson
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request

from app.completions.intake import PreparedCompletion
from app.completions.line import BROKER_ERRORS, Bell, Line
from app.completions.records import (
    Ending,
    Failure,
    cancel_completion,
    end_overdue,
    fail_completion,
    has_worker,
    read_ending,
    store_completion,
    store_unlisted,
)
from app.completions.unlisted import UnlistedCompletion
from app.errors import ApiError, InvalidRequestError, UnavailableError
from app.kit.db import RETRIED, Conn, Database, DatabaseUnavailableError
from app.steering.vectors import store_vectors

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_AFTER_SECONDS = 5
BELL_SECONDS = 0.5  # between two looks whether the client is still there
LOOK_SECONDS = 1.0  # between two looks into Postgres
STAY_SECONDS = 1.5  # between two signs that somebody waits
SAYING_SECONDS = 1.0  # that one sign may be on its way
LOOKS = 8  # at once: while Postgres is away, they must not fill the threads that all routes share
AWAY_SECONDS = 15.0  # that Postgres may be away while an answer is waited for
DATABASE_AWAY = (*RETRIED, DatabaseUnavailableError)
# A vector is unknown to a worker only when its owner deleted it after the request was checked.
# The last three are of bodies that a worker checked.
BAD_REQUESTS = frozenset(
    {
        *("invalid_request", "non_finite_activations", "unknown_vector"),
        *("context_length_exceeded", "named_vectors_too_large", "captured_rows_too_large"),
    }
)
AWAY = frozenset(
    {
        *("deadline_exceeded", "not_taken", "worker_lost", "worker_stopped"),
        *("broker_unavailable", "unavailable"),
    }
)
NO_BROKER = Failure(
    "broker_unavailable", "The message broker cannot be reached at the moment. Send it again."
)


class ClientLeftError(Exception):
    """The client closed the connection before its answer was there."""


class Desk:
    """What the API needs to have Completions run."""

    def __init__(self, database: Database, redis_url: str, *, waiting_max: int) -> None:
        """Connect to Redis on first use; at most `waiting_max` Completions wait at once."""
        self.database = database
        self.line = Line(redis_url)
        self.bell = Bell(redis_url, waiting_max=waiting_max)
        self._looking = anyio.CapacityLimiter(LOOKS)

    async def close(self) -> None:
        """Close the connections to Redis."""
        self.line.close()
        await self.bell.close()

    def submit(self, account_id: UUID, prepared: PreparedCompletion, *, seconds: float) -> None:
        """Hold the tokens of a Completion and put it in line for a worker.

        Raises UnavailableError (nothing is held then) and InsufficientTokensError.
        """
        model = prepared.model.name

        def store(conn: Conn) -> None:
            _need_worker(conn, model)
            store_vectors(conn, account_id, prepared.vectors.values())
            store_completion(
                conn,
                account_id,
                prepared.id,
                model=model,
                specs=prepared.specs,
                seconds=seconds,
                stream=prepared.stream,
            )

        self.database.run(store)
        self._put_in_line(model, prepared.id)

    def submit_unlisted(
        self, account_id: UUID, unlisted: UnlistedCompletion, *, seconds: float
    ) -> None:
        """Hold the upper bound of a Completion that its worker will check; else as `submit`."""

        def store(conn: Conn) -> None:
            _need_worker(conn, unlisted.model)
            store_unlisted(conn, account_id, unlisted, seconds=seconds)

        self.database.run(store)
        self._put_in_line(unlisted.model, unlisted.id)

    def _put_in_line(self, model: str, completion_id: UUID) -> None:
        try:
            self.line.open_reader(completion_id)
            self.line.put(model, completion_id)
        except BROKER_ERRORS as error:
            log.warning("Completion not put in line", extra={"error": repr(error)})
            self.database.run(lambda conn: fail_completion(conn, completion_id, NO_BROKER))
            raise error_of(NO_BROKER) from error

    async def outcomes(
        self, request: Request, prepared: PreparedCompletion | UnlistedCompletion
    ) -> Any:
        """Wait for what the worker of a Completion gave: outcomes, or an unlisted one's answer.

        Raises the ApiError that its end means, and ClientLeftError after cancelling it.
        """
        presence = Presence(self.bell, prepared.id)
        try:
            ending = await self._wait(request, prepared.id)
        except BaseException:
            # The client left, or this process stops: nobody will read the answer.
            await asyncio.shield(self._leave(prepared.id, presence))
            raise
        finally:
            presence.end()
        if ending.failure is not None:
            raise error_of(ending.failure)
        try:
            answer = await run_in_threadpool(self.line.read_answer, prepared.id)
        except BROKER_ERRORS as error:
            raise error_of(NO_BROKER) from error
        if answer is None:
            raise error_of(NO_BROKER)
        return await run_in_threadpool(orjson.loads, answer)

    async def _wait(self, request: Request, completion_id: UUID) -> Ending:
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        lookout = Lookout(self, completion_id)
        while True:
            if await request.is_disconnected():
                raise ClientLeftError
            try:
                rang = await self.bell.wait(completion_id, BELL_SECONDS)
            except BROKER_ERRORS:
                rang = False
                await asyncio.sleep(BELL_SECONDS)
            if not rang and loop.time() - looked_at < LOOK_SECONDS:
                continue
            looked_at = loop.time()
            ending = await lookout.look()
            if ending is not None and ending.is_final:
                return ending

    async def _leave(self, completion_id: UUID, presence: "Presence") -> None:
        """Cancel a Completion; where Postgres cannot be reached from here, its worker does."""
        await asyncio.gather(
            self.try_once(lambda conn: cancel_completion(conn, completion_id)),
            presence.leave(),
            return_exceptions=True,
        )

    async def try_once(self, work: Callable[[Conn], T]) -> T:
        """Run a transaction about one that waits, off the event loop; it is not repeated."""
        return await anyio.to_thread.run_sync(
            partial(self.database.run, work, attempts=1), limiter=self._looking
        )


class Presence:
    """Says again and again that somebody waits for a Completion, until that ends.

    It is ended by a flag: the client of Redis may swallow a cancel.
    """

    def __init__(self, bell: Bell, completion_id: UUID) -> None:
        """Begin to say so; call it on the event loop."""
        self._bell = bell
        self._id = completion_id
        self._ended = asyncio.Event()
        self._saying = asyncio.ensure_future(self._say())

    def end(self) -> None:
        """Say it no more; what was said last counts for some seconds."""
        self._ended.set()

    async def leave(self, *, failed: bool = False) -> None:
        """Take it back: the client left, or the API `failed` its stream.

        Raises one of BROKER_ERRORS when Redis is away.
        """
        self.end()
        # What is on its way must not come after.
        await asyncio.wait({self._saying}, timeout=SAYING_SECONDS)
        await self._bell.leave(self._id, failed=failed)

    async def _say(self) -> None:
        could = True
        while not self._ended.is_set():
            try:
                await self._bell.stay(self._id)
                could = True
            except BROKER_ERRORS as error:
                if could:
                    log.warning("cannot stay at a Completion", extra={"error": repr(error)})
                could = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STAY_SECONDS):
                    await self._ended.wait()


class Lookout:
    """Looks into Postgres for one Completion; Postgres may be away for AWAY_SECONDS."""

    def __init__(self, desk: Desk, completion_id: UUID) -> None:
        """Look at nothing yet."""
        self._desk = desk
        self._id = completion_id
        self._away_since: float | None = None

    async def look(self) -> Ending | None:
        """Look where it stands, and end it if its time is over; None while Postgres is away.

        Raises one of DATABASE_AWAY once it has been away for too long.
        """
        try:
            ending = await self._desk.try_once(lambda conn: _look(conn, self._id))
        except DATABASE_AWAY:
            now = asyncio.get_running_loop().time()
            if self._away_since is None:
                self._away_since = now
            if now - self._away_since >= AWAY_SECONDS:
                raise
            return None
        self._away_since = None
        return ending


def _need_worker(conn: Conn, model: str) -> None:
    if not has_worker(conn, model):
        msg = f"No worker serves {model} at the moment. Send it again later, or as a Job."
        raise UnavailableError(msg, code="no_worker", retry_after=RETRY_AFTER_SECONDS)


def _look(conn: Conn, completion_id: UUID) -> Ending:
    end_overdue(conn, completion_id=completion_id)
    ending = read_ending(conn, completion_id)
    assert ending is not None
    return ending


def error_of(failure: Failure) -> ApiError:
    """Turn a failure into the error that the client sees."""
    if failure.code in AWAY:
        return UnavailableError(failure.message, code=failure.code, retry_after=RETRY_AFTER_SECONDS)
    if failure.code in BAD_REQUESTS:
        return InvalidRequestError(failure.message, code=failure.code, param=failure.param)
    return ApiError(failure.message, code=failure.code)
