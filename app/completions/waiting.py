"""One Completion from its Hold to its answer: store, put in line, wait, read.

Redis says quickly that the end has come; Postgres says what the end was, and is looked at every
second besides, so that a lost message, worker or broker costs seconds and not the deadline. A
client that leaves takes its Completion along.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar
from uuid import UUID

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
)
from app.errors import ApiError, InvalidRequestError, UnavailableError
from app.kit.db import Conn, Database
from app.steering.vectors import store_vectors

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_AFTER_SECONDS = 5
BELL_SECONDS = 0.5  # between two looks whether the client is still there
LOOK_SECONDS = 1.0  # between two looks into Postgres
# A vector is unknown to a worker only when its owner deleted it after the request was checked.
BAD_REQUESTS = frozenset({"invalid_request", "non_finite_activations", "unknown_vector"})
AWAY = frozenset(
    {"deadline_exceeded", "not_taken", "worker_lost", "worker_stopped", "broker_unavailable"}
)
NO_BROKER = Failure(
    "broker_unavailable", "The message broker cannot be reached at the moment. Send it again."
)


class ClientLeftError(Exception):
    """The client closed the connection before its answer was there."""


class Desk:
    """What the API needs to have Completions run."""

    def __init__(self, database: Database, redis_url: str) -> None:
        """Connect to Redis on first use."""
        self._database = database
        self._line = Line(redis_url)
        self._bell = Bell(redis_url)
        self.waiting = 0

    async def close(self) -> None:
        """Close the connections to Redis."""
        self._line.close()
        await self._bell.close()

    def submit(self, account_id: UUID, prepared: PreparedCompletion, *, seconds: float) -> None:
        """Hold the tokens of a Completion and put it in line for a worker.

        Raises UnavailableError (nothing is held then) and InsufficientTokensError.
        """
        model = prepared.model.name

        def store(conn: Conn) -> None:
            if not has_worker(conn, model):
                msg = f"No worker serves {model} at the moment. Send it again later, or as a Job."
                raise UnavailableError(msg, code="no_worker", retry_after=RETRY_AFTER_SECONDS)
            store_vectors(conn, account_id, prepared.vectors.values())
            store_completion(
                conn, account_id, prepared.id, model=model, specs=prepared.specs, seconds=seconds
            )

        self._database.run(store)
        try:
            self._line.put(model, prepared.id)
        except BROKER_ERRORS as error:
            log.warning("Completion not put in line", extra={"error": repr(error)})
            self._database.run(lambda conn: fail_completion(conn, prepared.id, NO_BROKER))
            raise error_of(NO_BROKER) from error

    async def outcomes(self, request: Request, prepared: PreparedCompletion) -> list[Any]:
        """Wait for the answer of a Completion that was put in line.

        Raises the ApiError that its end means, and ClientLeftError after cancelling it.
        """
        try:
            ending = await self._wait(request, prepared.id)
        except BaseException:
            # The client left, or this process stops: nobody will read the answer.
            with contextlib.suppress(Exception):
                await asyncio.shield(self._in_thread(lambda c: cancel_completion(c, prepared.id)))
            raise
        if ending.failure is not None:
            raise error_of(ending.failure)
        try:
            answer = await run_in_threadpool(self._line.read_answer, prepared.id)
        except BROKER_ERRORS as error:
            raise error_of(NO_BROKER) from error
        if answer is None:
            raise error_of(NO_BROKER)
        outcomes: list[Any] = await run_in_threadpool(orjson.loads, answer)
        return outcomes

    async def _wait(self, request: Request, completion_id: UUID) -> Ending:
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        while True:
            if await request.is_disconnected():
                raise ClientLeftError
            try:
                rang = await self._bell.wait(completion_id, BELL_SECONDS)
            except BROKER_ERRORS:
                rang = False
                await asyncio.sleep(BELL_SECONDS)
            if not rang and loop.time() - looked_at < LOOK_SECONDS:
                continue
            looked_at = loop.time()
            ending = await self._in_thread(lambda conn: _look(conn, completion_id))
            if ending.is_final:
                return ending

    async def _in_thread(self, work: Callable[[Conn], T]) -> T:
        return await run_in_threadpool(self._database.run, work)


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
        return InvalidRequestError(failure.message, code=failure.code)
    return ApiError(failure.message, code=failure.code)
