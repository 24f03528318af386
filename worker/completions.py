"""Completions in the worker: taken from Redis, run beside Jobs, settled, answered.

    take (a thread of its own) -> claim -> engine -> put the answer -> settle -> ring
                                             `-> tokens, where they are streamed

A listener that waits in Redis is not bothered by a drain that runs for hours, nor by an idle
Celery. What a client left, or whose time is over, is aborted within a second: its row says so.
An answer is put before its row is settled, so that nobody pays for one that got lost; the API
reads it only once the row says that it counts. What nobody waits for any more, because its client
left or its API died, is aborted as well and its row ended here: a stream is charged what the
engine had made by then, unless it was the API that failed it; without a stream nothing is. A stream
whose client does not read is ended likewise a while after its last token, before it expires.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from app.completions.line import BROKER_ERRORS, Line, Reader
from app.completions.records import (
    ClaimedCompletion,
    Failure,
    cancel_completion,
    claim_completion,
    end_overdue,
    fail_completion,
    still_running,
    succeed_completion,
)
from app.kit.db import RETRIED, Conn, Database, DatabaseUnavailableError
from worker.completion_answer import answer_bytes, pieces_bytes, stream_end_bytes
from worker.completion_choices import ChoiceRunner, logprob_entries
from worker.completion_stream import NO_BROKER, TokenSender, TokenStream
from worker.engine.protocol import Engine, EngineDeadError
from worker.failpoints import failpoint
from worker.heartbeat import Speedometer
from worker.outcomes import Errored, Succeeded
from worker.shares import Shares
from worker.stopping import Stopping
from worker.unlisted import AdmittedCompletion, Gate
from worker.vectors import VectorShelf, vector_ids

log = logging.getLogger(__name__)
T = TypeVar("T")

TAKE_SECONDS = 1.0  # of one wait in Redis, and between two tries while it is away
THREADS = 4
SEND_THREADS = 2  # tokens and looks at readers: no Postgres, which could hold up all
HEAVY_THREADS = 4  # whole bodies and whole answers
LOOK_SECONDS = 0.5  # between two looks whether running Completions are still wanted
# A reader that says nothing for so long has left; a Redis that was started anew knows of none.
MISSED_SECONDS = 3.0
# That a client may take to read on once all is made; an end that is charged, and so comes before
# the deadline, which releases all.
READING_SECONDS = 60.0
SETTLING_SECONDS = 5.0  # kept for that end
STOPPED = Failure("worker_stopped", "The worker was stopped. Send it again.")
ENGINE_DIED = Failure("worker_lost", "The worker that ran the Completion was lost. Send it again.")
OUR_FAULT = Failure("engine_error", "The worker failed on this Completion.")
DATABASE_AWAY = (*RETRIED, DatabaseUnavailableError)


@dataclass(slots=True)
class _Visit:
    """A Completion in the engine: `abort` may be called until its outcome is there."""

    task: asyncio.Task[None]
    stream: TokenStream | None
    deadline: float  # on the loop's clock, and never later than the row's
    is_aborted: bool = False
    was_left: bool = False
    failure: Failure | None = None  # that the API told the client already
    was_seen: bool = False  # its reader's key
    missed_since: float | None = None  # when its reader was first not to be found

    def look(self, reader: Reader, now: float) -> None:
        """Abort what nobody waits for any more."""
        if reader is not Reader.missing:
            self.was_seen = True
            self.missed_since = None
        # An older API sets the key for streams alone.
        elif self.missed_since is None and (self.was_seen or self.stream is not None):
            self.missed_since = now
        is_missed = self.missed_since is not None and now - self.missed_since >= MISSED_SECONDS
        if self.is_aborted:
            return
        if reader.has_failed:
            self.failure = NO_BROKER
            self.abort()
        elif reader is Reader.left or is_missed:
            self.was_left = True
            self.abort()

    def abort(self) -> None:
        # Once: a second cancel would break off the abort that waits for the engine's last tokens.
        if not self.is_aborted:
            self.is_aborted = True
            self.task.cancel()


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
        gate: Gate,
        speed: Speedometer,
        stopping: Stopping,
        logprob_entries_max: int,
    ) -> None:
        """Prepare inside the engine's event loop; `start` begins to take."""
        self._database = database
        self._line = Line(redis_url)
        self._worker_id = worker_id
        self._choices = ChoiceRunner(engine)
        # Alternatives are Python objects until all of an answer is sent.
        self._logprobs = Shares(logprob_entries_max, logprob_entries_max // 2)
        self._model = engine.facts.model
        self._shelf = shelf
        self._gate = gate
        # Of its own: claims must not wait behind the parts that Jobs write.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="completions")
        self._senders = ThreadPoolExecutor(SEND_THREADS, thread_name_prefix="tokens")
        self._heavy = ThreadPoolExecutor(HEAVY_THREADS, thread_name_prefix="answers")
        self._speed = speed
        self._stopping = stopping
        self._loop = asyncio.get_running_loop()
        self._running: dict[UUID, asyncio.Task[None]] = {}
        self._in_engine: dict[UUID, _Visit] = {}  # those that may still be aborted
        self._tokens = TokenSender(self._line, lambda work: self._call(work, self._senders))
        self._thread = threading.Thread(target=self._listen, name="completions", daemon=True)
        self._helpers: list[asyncio.Task[None]] = []

    @property
    def in_flight(self) -> int:
        """How many Completions run now."""
        return len(self._running)

    def start(self) -> None:
        """Begin to take Completions; call it on the event loop once the worker is ready."""
        looks = (self._again(self._abort_unread), self._again(self._abort_ended))
        for helper in (*looks, self._tokens.run()):
            self._helpers.append(self._loop.create_task(helper))
        self._thread.start()

    async def finish(self) -> None:
        """Let running Completions end until the stop is hard, then give the rest up."""
        while self._running and not self._stopping.is_hard:
            await asyncio.wait(list(self._running.values()), timeout=0.1)
        for completion_id, task in list(self._running.items()):
            visit = self._in_engine.get(completion_id)
            if visit is None:
                task.cancel()
            else:
                visit.abort()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for helper in self._helpers:
            helper.cancel()
        for threads in (self._threads, self._senders, self._heavy):
            threads.shutdown(wait=False)

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
        claimed: ClaimedCompletion | None = None
        began = self._loop.time()
        try:
            claimed = await self._call(lambda: self._claim(completion_id))
            if claimed is None:
                return
            failpoint("completion_claimed")
            failure = await self._run(claimed, began + claimed.seconds_left)
            if failure is not None:
                await self._call(lambda: self._fail(completion_id, failure, claimed))
        except DATABASE_AWAY as error:
            # The row stays as it is; its client or the reconciler ends it.
            log.warning("Completion given up", extra={"error": str(error)})
        except Exception:
            log.exception("Completion failed", extra={"completion_id": completion_id.hex})
            await self._call(lambda: self._fail(completion_id, OUR_FAULT, claimed))

    async def _run(self, claimed: ClaimedCompletion, deadline: float) -> Failure | None:
        """Run a claimed Completion; give the reason when it has no answer."""
        if claimed.body is not None:
            admitted = await self._call(lambda: self._gate.admit(claimed), self._heavy)
            if isinstance(admitted, Failure):
                return admitted
            claimed = admitted
        if not claimed.stream:
            return await self._run_with(claimed, None, deadline)
        write = claimed.chunks if isinstance(claimed, AdmittedCompletion) else pieces_bytes
        stream = self._tokens.open(claimed, lambda: self._abort({claimed.id}), write)
        try:
            return await self._run_with(claimed, stream, deadline)
        finally:
            self._tokens.close(stream)

    async def _run_with(
        self, claimed: ClaimedCompletion, stream: TokenStream | None, deadline: float
    ) -> Failure | None:
        visit = _Visit(self._running[claimed.id], stream, deadline)
        try:
            return await self._answer(claimed, visit)
        except asyncio.CancelledError:
            return await self._given_up(claimed, visit)
        except EngineDeadError:
            return ENGINE_DIED

    async def _answer(self, claimed: ClaimedCompletion, visit: _Visit) -> Failure | None:
        """Run a Completion in the engine and deliver what it gave; until then it may be aborted."""
        ids, stream = vector_ids(claimed.specs), visit.stream
        outcomes: Sequence[Succeeded | Errored] = ()
        was_sent = True
        async with contextlib.AsyncExitStack() as stack:
            try:
                try:
                    await self._call(lambda: self._shelf.take(claimed.account_id, ids))
                    self._in_engine[claimed.id] = visit
                    if entries := logprob_entries(claimed.specs):
                        kept = self._logprobs.taken(claimed.account_id, entries)
                        await stack.enter_async_context(kept)
                    outcomes = await self._choices.run(
                        claimed, None if stream is None else stream.give
                    )
                    if stream is not None:
                        left = visit.deadline - self._loop.time()
                        was_sent = await stream.sent(reading_seconds(left))
                finally:
                    self._in_engine.pop(claimed.id, None)
                    await self._call(lambda: self._shelf.give_back(ids))
                errored = next((item for item in outcomes if isinstance(item, Errored)), None)
                if errored is not None:
                    return Failure(errored.code, errored.message)
                if stream is not None and stream.failure is not None:
                    return stream.failure
                if stream is not None and not was_sent:
                    made = stream.generated
                    await self._call(lambda: self._end_unread(claimed, made))
                    return None
                done = [item for item in outcomes if isinstance(item, Succeeded)]
                return await self._call(lambda: self._deliver(claimed, done), self._heavy)
            finally:
                for item in outcomes:
                    if isinstance(item, Succeeded):
                        item.release()

    async def _given_up(self, claimed: ClaimedCompletion, visit: _Visit) -> Failure | None:
        """Say why a Completion was aborted; one that was left is ended here."""
        stream = visit.stream
        if visit.failure is not None:
            return visit.failure
        if visit.was_left:
            made = None if stream is None else stream.generated
            await self._call(lambda: self._end_left(claimed.id, made))
            return None
        if stream is not None and stream.failure is not None:
            return stream.failure
        return STOPPED  # if another has ended the row, this changes nothing

    def _claim(self, completion_id: UUID) -> ClaimedCompletion | None:
        return self._database.run(
            lambda conn: claim_completion(conn, completion_id, self._worker_id, model=self._model)
        )

    def _end_unread(self, claimed: ClaimedCompletion, generated: int) -> None:
        """End a stream that was not read in time as one that was left; who reads on is told."""
        if self._end_left(claimed.id, generated):
            self._ring(claimed.id, claimed)

    def _end_left(self, completion_id: UUID, generated: int | None) -> bool:
        """End what was left: a stream pays for the prompt and what was made, else nothing is."""
        ended = self._database.run(
            lambda conn: cancel_completion(
                conn, completion_id, generated=generated, worker_id=self._worker_id
            )
        )
        self._speed.add(generated or 0)
        return ended

    def _deliver(self, claimed: ClaimedCompletion, outcomes: list[Succeeded]) -> Failure | None:
        """Put the answer (of a stream, what follows its tokens), settle, ring; blocking."""
        completion_id = claimed.id
        tokens = sum(outcome.completion_tokens for outcome in outcomes)
        try:
            reader = self._line.readers([completion_id])[completion_id]
            if reader.has_failed:
                return NO_BROKER
            if reader is Reader.left:
                self._end_left(completion_id, tokens if claimed.stream else None)
                return None
            answer = _written(claimed, outcomes)
            self._line.put_answer(completion_id, answer)
        except BROKER_ERRORS as error:
            log.warning("answer not sent", extra={"error": repr(error)})
            return NO_BROKER
        except ValueError as error:
            return Failure("engine_error", str(error))
        failpoint("completion_answered")
        counts = self._database.run(
            lambda conn: succeed_completion(conn, completion_id, self._worker_id, tokens)
        )
        if not counts:
            log.info("Completion ended before its answer", extra={"id": completion_id.hex})
            self._take_back(completion_id)
            return None
        self._speed.add(tokens)
        self._ring(completion_id, claimed)
        return None

    def _take_back(self, completion_id: UUID) -> None:
        """Delete an answer that nobody will read: Redis has room for few of the largest."""
        try:
            self._line.read_answer(completion_id)
        except BROKER_ERRORS as error:
            log.warning("answer not taken back", extra={"error": repr(error)})

    def _fail(
        self, completion_id: UUID, failure: Failure, claimed: ClaimedCompletion | None
    ) -> None:
        """End a row that has no answer; what was aborted because it is late, ends as late."""

        def end(conn: Conn) -> bool:
            return end_overdue(conn, completion_id=completion_id) > 0 or fail_completion(
                conn, completion_id, failure, worker_id=self._worker_id
            )

        ended = self._database.run(end)
        if ended:
            self._ring(completion_id, claimed)

    def _ring(self, completion_id: UUID, claimed: ClaimedCompletion | None) -> None:
        try:
            if claimed is not None and claimed.stream:
                self._line.end_tokens(completion_id)
            else:
                self._line.ring(completion_id)
        except BROKER_ERRORS as error:
            # The API looks into Postgres every second besides.
            log.warning("end not told", extra={"error": repr(error)})

    async def _again(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Look again and again, whatever one look comes to."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await look()
            except Exception:
                log.exception("looking after running Completions failed")

    async def _abort_unread(self) -> None:
        """Abort what nobody waits for; apart from Postgres, which may be away."""
        visits = dict(self._in_engine)
        if not visits:
            return
        with contextlib.suppress(*BROKER_ERRORS):  # then no answer can be sent: that ends it
            readers = await self._call(partial(self._line.readers, set(visits)), self._senders)
            for name in visits.keys() & self._in_engine.keys():
                visits[name].look(readers[name], self._loop.time())

    async def _abort_ended(self) -> None:
        """Abort what has ended otherwise: it was cancelled, or has expired."""
        ids = set(self._in_engine)
        if ids:
            with contextlib.suppress(*DATABASE_AWAY):
                self._abort(ids - await self._call(partial(self._wanted, ids)))

    def _abort(self, ids: Iterable[UUID]) -> None:
        for completion_id in ids:
            visit = self._in_engine.get(completion_id)
            if visit is not None:
                visit.abort()

    def _wanted(self, ids: set[UUID]) -> set[UUID]:
        return self._database.run(
            lambda conn: still_running(conn, self._worker_id, ids), attempts=1
        )

    async def _call(self, work: Callable[[], T], threads: ThreadPoolExecutor | None = None) -> T:
        """Run blocking work to its end off the event loop, also when the task is cancelled."""
        return await asyncio.shield(self._loop.run_in_executor(threads or self._threads, work))


def reading_seconds(left: float) -> float | None:
    """Say how long a stream's client may still read, with so many seconds `left` to the row.

    None once its time is over: then it is not the client that was late, and the row expires.
    """
    if left <= 0:
        return None
    return min(READING_SECONDS, max(left - SETTLING_SECONDS, left / 2))


def _written(claimed: ClaimedCompletion, outcomes: list[Succeeded]) -> bytes:
    """Write the answer; of a stream, what follows its tokens."""
    if isinstance(claimed, AdmittedCompletion):
        return claimed.stream_end(outcomes) if claimed.stream else claimed.answer(outcomes)
    return stream_end_bytes(outcomes) if claimed.stream else answer_bytes(outcomes)
