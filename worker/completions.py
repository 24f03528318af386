"""Completions in the worker: taken from Redis, run beside Jobs, settled, answered.

    take (a thread of its own) -> claim -> engine -> put the answer -> settle -> ring

A listener that waits in Redis is not bothered by a drain that runs for hours, nor by an idle
Celery. What a client left, or whose time is over, is aborted within a second: its row says so.
An answer is put before its row is settled, so that nobody pays for one that got lost; the API
reads it only once the row says that it counts.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from uuid import UUID

from app.completions.line import BROKER_ERRORS, Line
from app.completions.records import (
    ClaimedCompletion,
    Failure,
    claim_completion,
    end_overdue,
    fail_completion,
    still_running,
    succeed_completion,
)
from app.completions.salt import salt_for
from app.completions.spec import RequestSpec
from app.kit.db import RETRIED, Conn, Database, DatabaseUnavailableError
from worker.completion_answer import answer_bytes
from worker.engine.protocol import Engine, EngineDeadError, EngineRequestError
from worker.failpoints import failpoint
from worker.heartbeat import Speedometer
from worker.outcomes import Errored, Succeeded
from worker.stopping import Stopping
from worker.vectors import VectorShelf, vector_ids

log = logging.getLogger(__name__)
T = TypeVar("T")

TAKE_SECONDS = 1.0  # of one wait in Redis, and between two tries while it is away
THREADS = 4
LOOK_SECONDS = 0.5  # between two looks whether running Completions are still wanted
STOPPED = Failure("worker_stopped", "The worker was stopped. Send it again.")
ENGINE_DIED = Failure("worker_lost", "The worker that ran the Completion was lost. Send it again.")
NO_BROKER = Failure("broker_unavailable", "The answer could not be sent back. Send it again.")
OUR_FAULT = Failure("engine_error", "The worker failed on this Completion.")
DATABASE_AWAY = (*RETRIED, DatabaseUnavailableError)


class CompletionListener:
    """Takes Completions of one model and runs them on the worker's engine."""

    def __init__(
        self,
        database: Database,
        redis_url: str,
        *,
        worker_id: UUID,
        engine: Engine,
        shelf: VectorShelf,
        speed: Speedometer,
        stopping: Stopping,
    ) -> None:
        """Prepare inside the engine's event loop; `start` begins to take."""
        self._database = database
        self._line = Line(redis_url)
        self._worker_id = worker_id
        self._engine = engine
        self._model = engine.facts.model
        self._shelf = shelf
        # Of its own: claims must not wait behind the parts that Jobs write.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="completions")
        self._speed = speed
        self._stopping = stopping
        self._loop = asyncio.get_running_loop()
        self._running: dict[UUID, asyncio.Task[None]] = {}
        self._in_engine: dict[UUID, asyncio.Task[None]] = {}  # those that may still be aborted
        self._thread = threading.Thread(target=self._listen, name="completions", daemon=True)
        self._watch: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        """How many Completions run now."""
        return len(self._running)

    def start(self) -> None:
        """Begin to take Completions; call it on the event loop once the worker is ready."""
        self._watch = self._loop.create_task(self._abort_unwanted())
        self._thread.start()

    async def finish(self) -> None:
        """Let running Completions end until the stop is hard, then give the rest up."""
        while self._running and not self._stopping.is_hard:
            await asyncio.wait(list(self._running.values()), timeout=0.1)
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self._watch is not None:
            self._watch.cancel()
        self._threads.shutdown(wait=False)

    def _listen(self) -> None:
        while not self._stopping.is_soft:
            try:
                taken = self._line.take(self._model, TAKE_SECONDS)
                if taken is None:
                    continue
                if self._stopping.wait(0):
                    self._line.put_back(self._model, taken)
                    return
            except BROKER_ERRORS as error:
                log.warning("cannot listen for Completions", extra={"error": repr(error)})
                self._stopping.wait(TAKE_SECONDS)
            except Exception:
                # A thread that ended here would leave Completions unanswered without a word.
                log.exception("listening for Completions failed")
                self._stopping.wait(TAKE_SECONDS)
            else:
                self._loop.call_soon_threadsafe(self._begin, taken)

    def _begin(self, completion_id: UUID) -> None:
        if completion_id not in self._running:
            task = self._loop.create_task(self._serve(completion_id))
            self._running[completion_id] = task
            task.add_done_callback(lambda _: self._running.pop(completion_id, None))

    async def _serve(self, completion_id: UUID) -> None:
        try:
            claimed = await self._call(lambda: self._claim(completion_id))
            if claimed is None:
                return
            failpoint("completion_claimed")
            failure = await self._run(claimed)
            if failure is not None:
                await self._call(lambda: self._fail(completion_id, failure))
        except DATABASE_AWAY as error:
            # The row stays as it is; its client or the reconciler ends it.
            log.warning("Completion given up", extra={"error": str(error)})
        except Exception:
            log.exception("Completion failed", extra={"completion_id": completion_id.hex})
            await self._call(lambda: self._fail(completion_id, OUR_FAULT))

    async def _run(self, claimed: ClaimedCompletion) -> Failure | None:
        """Run a claimed Completion; give the reason when it has no answer."""
        ids = vector_ids(claimed.specs)
        try:
            await self._call(lambda: self._shelf.take(claimed.account_id, ids))
            self._in_engine[claimed.id] = self._running[claimed.id]
            outcomes = await self._ask_engine(claimed)
        except asyncio.CancelledError:
            return STOPPED  # if its client left, the row has ended and this changes nothing
        except EngineDeadError:
            return ENGINE_DIED
        finally:
            self._in_engine.pop(claimed.id, None)
            await self._call(lambda: self._shelf.give_back(ids))
        try:
            errored = next((item for item in outcomes if isinstance(item, Errored)), None)
            if errored is not None:
                return Failure(errored.code, errored.message)
            done = [item for item in outcomes if isinstance(item, Succeeded)]
            return await self._call(lambda: self._deliver(claimed.id, done))
        finally:
            for item in outcomes:
                if isinstance(item, Succeeded):
                    item.release()

    async def _ask_engine(self, claimed: ClaimedCompletion) -> list[Succeeded | Errored]:
        """Run all prompts at once; the failure or abort of one ends the others."""
        tasks = [
            asyncio.ensure_future(self._ask(f"{claimed.id.hex}.{place}", claimed.account_id, spec))
            for place, spec in enumerate(claimed.specs)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Succeeded):
                    ended.release()
            raise

    async def _ask(self, key: str, account_id: UUID, spec: RequestSpec) -> Succeeded | Errored:
        try:
            salt = salt_for(account_id, spec)
            outcome = await self._engine.run(key, spec, salt=salt, urgent=True)
        except EngineRequestError as error:
            return Errored(error.code, str(error))
        if isinstance(outcome, Succeeded | Errored):
            return outcome
        raise asyncio.CancelledError

    def _claim(self, completion_id: UUID) -> ClaimedCompletion | None:
        return self._database.run(
            lambda conn: claim_completion(conn, completion_id, self._worker_id, model=self._model)
        )

    def _deliver(self, completion_id: UUID, outcomes: list[Succeeded]) -> Failure | None:
        """Put the answer, settle, ring; blocking."""
        try:
            self._line.put_answer(completion_id, answer_bytes(outcomes))
        except BROKER_ERRORS as error:
            log.warning("answer not sent", extra={"error": repr(error)})
            return NO_BROKER
        except ValueError as error:
            return Failure("engine_error", str(error))
        failpoint("completion_answered")
        tokens = sum(outcome.completion_tokens for outcome in outcomes)
        counts = self._database.run(
            lambda conn: succeed_completion(conn, completion_id, self._worker_id, tokens)
        )
        if not counts:
            log.info("Completion ended before its answer", extra={"id": completion_id.hex})
            return None
        self._speed.add(tokens)
        self._ring(completion_id)
        return None

    def _fail(self, completion_id: UUID, failure: Failure) -> None:
        """End a row that has no answer; what was aborted because it is late, ends as late."""

        def end(conn: Conn) -> bool:
            return end_overdue(conn, completion_id=completion_id) > 0 or fail_completion(
                conn, completion_id, failure, worker_id=self._worker_id
            )

        ended = self._database.run(end)
        if ended:
            self._ring(completion_id)

    def _ring(self, completion_id: UUID) -> None:
        try:
            self._line.ring(completion_id)
        except BROKER_ERRORS as error:
            # The API looks into Postgres every second besides.
            log.warning("end not told", extra={"error": repr(error)})

    async def _abort_unwanted(self) -> None:
        """Abort what was cancelled or has expired: another has ended its row."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            running = set(self._in_engine)
            if not running:
                continue
            try:
                wanted = await self._call(partial(self._wanted, running))
            except DATABASE_AWAY:
                continue
            for completion_id in running - wanted:
                task = self._in_engine.get(completion_id)
                if task is not None:
                    task.cancel()

    def _wanted(self, ids: set[UUID]) -> set[UUID]:
        return self._database.run(lambda conn: still_running(conn, self._worker_id, ids))

    async def _call(self, work: Callable[[], T]) -> T:
        """Run blocking work to its end off the event loop, also when the task is cancelled."""
        return await asyncio.shield(self._loop.run_in_executor(self._threads, work))
