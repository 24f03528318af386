"""One leased shard on its way through the engine: start, collect, publish, finish.

    load work -> run requests (in index order, as the engine has room) -> part files
              -> object store (waited for while it is away)
              -> one fenced transaction: states, charges, part

Every request gets exactly one outcome. What was not started when the worker stops or the Job is
paused goes back to Postgres as a pending shard; what was running when a Job is cancelled is
aborted and becomes cancelled. A run whose lease was lost leaves nothing behind. A shard of a
reproducible Job is a group: it starts all at once, and what does not end whole goes back whole.
"""

import asyncio
import contextlib
import contextvars
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from app.completions.salt import salt_for
from app.completions.spec import spec_from_json
from app.jobs.claims import finish_shard, load_work, split_off
from app.jobs.records import LeasedShard, PublishedPart, RequestResult
from app.jobs.states import RequestState
from app.kit.db import Database
from app.kit.ids import public_id
from app.kit.logs import log_fields
from app.results.finalize import finalize_job
from app.storage import ObjectStore, StoreError
from worker.engine.protocol import Engine, EngineDeadError, EngineRequestError, Group
from worker.failpoints import failpoint
from worker.heartbeat import LeaseWatch, Speedometer
from worker.outcomes import Cancelled, Errored, Outcome, Succeeded, Work
from worker.part_writer import PartWriter, StoreAwayError
from worker.stopping import Stopping
from worker.vectors import VectorShelf, vector_ids

log = logging.getLogger(__name__)
T = TypeVar("T")

STORE_RETRY_SECONDS = 1.0
STORE_LAST_SECONDS = 20.0  # that a store which hangs may keep a worker that has to end


@dataclass(frozen=True, slots=True)
class Shop:
    """What all shard runs of a worker share."""

    database: Database
    store: ObjectStore
    engine: Engine
    shelf: VectorShelf
    room: asyncio.Semaphore  # requests that the engine may hold at once
    threads: Executor
    uploads: Executor  # a store that hangs must not hold up anything else
    speed: Speedometer
    stopping: Stopping
    store_patience_seconds: float  # how long a finished part waits for a store that is away
    open_part: Callable[[LeasedShard], PartWriter]

    async def call(self, work: Callable[[], T]) -> T:
        """Run blocking work (Postgres, files) off the engine's event loop."""
        return await _call(self.threads, work)

    async def surely(self, work: Callable[[], object]) -> None:
        """Run blocking work to its end; a cancellation that comes meanwhile is raised after it."""
        working = asyncio.ensure_future(self.call(work))
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    async def upload(self, work: Callable[[], T]) -> T:
        """Run work that waits for the object store, beside everything else."""
        return await _call(self.uploads, work)


async def _call(threads: Executor, work: Callable[[], T]) -> T:
    inside = contextvars.copy_context()  # log lines of a thread name the Job, too
    return await asyncio.get_running_loop().run_in_executor(threads, inside.run, work)


class ShardRun:
    """Runs one shard; `wakeup` is set whenever the heartbeat learned something about its lease."""

    def __init__(self, shop: Shop, shard: LeasedShard) -> None:
        """Prepare; nothing happens before `run`."""
        self.shop = shop
        self.shard = shard
        self._loop = asyncio.get_running_loop()
        self._wakeup = asyncio.Event()
        self.watch = LeaseWatch(shard.lease_token, self._changed)
        self.fed = asyncio.Event()  # set once the engine has all of it, or will get no more
        self._running: dict[int, asyncio.Task[Outcome]] = {}
        self._in_engine: set[asyncio.Task[Outcome]] = set()  # those that may still be aborted
        self._results: dict[int, RequestResult] = {}
        self._broken: BaseException | None = None
        self._store_until: float | None = None  # set once the worker has to end

    def _changed(self) -> None:
        self._loop.call_soon_threadsafe(self._wakeup.set)

    def poke(self) -> None:
        """Look again at the stop events and at the lease; callable from any thread."""
        self._changed()

    @property
    def in_flight(self) -> int:
        """How many requests of this shard the engine has now."""
        return len(self._in_engine)

    @property
    def is_suspect(self) -> bool:
        """True when an engine that died had requests of this shard."""
        return self.in_flight > 0 or isinstance(self._broken, EngineDeadError)

    async def run(self) -> None:
        """Run the shard to its end, whatever that is.

        Raises EngineDeadError when the engine died: the caller reports it for all shards at once;
        StoreAwayError when the store stayed away: the caller gives the shard back. The lease is
        still held then.
        """
        job = public_id("job", self.shard.job_id)
        try:
            with log_fields(job_id=job, lease_token=str(self.shard.lease_token)):
                await self._run()
        finally:
            self.fed.set()

    async def _run(self) -> None:
        work = await self.shop.call(lambda: read_work(self.shop.database, self.shard))
        failpoint("after_claim")
        ids = vector_ids(item.spec for item in work)
        try:
            await self.shop.call(lambda: self.shop.shelf.take(self.shard.account_id, ids))
            await self._run_and_publish(work)
        finally:
            await self.shop.surely(lambda: self.shop.shelf.give_back(ids))

    async def _run_and_publish(self, work: list[Work]) -> None:
        writer = self.shop.open_part(self.shard)
        try:
            await self._run_all(work, writer)
            failpoint("after_engine")
            if self.watch.lost:
                log.warning("lease lost")
                return
            await self._publish(work, writer)
        finally:
            await self.shop.surely(writer.abandon)  # no effect after close

    async def _run_all(self, work: list[Work], writer: PartWriter) -> None:
        """Start requests in order as the engine has room; return when all that started ended."""
        watcher = asyncio.create_task(self._obey())
        try:
            if self.shard.reproducible:
                self._start_group(work, writer)
            else:
                await self._start_each(work, writer)
            self.fed.set()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
        finally:
            watcher.cancel()
            self._abort()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self._broken is not None:
            raise self._broken

    async def _start_each(self, work: list[Work], writer: PartWriter) -> None:
        for item in work:
            await self.shop.room.acquire()
            if not self._may_start():
                self.shop.room.release()
                break
            task = self._start(item, writer)
            task.add_done_callback(lambda _: self.shop.room.release())

    def _start_group(self, work: list[Work], writer: PartWriter) -> None:
        """Start all or nothing. The shard is alone in the engine, so there is room for it."""
        if self._may_start():
            for item, group in zip(work, groups_of(self.shard, work), strict=True):
                self._start(item, writer, group)

    def _start(
        self, item: Work, writer: PartWriter, group: Group | None = None
    ) -> asyncio.Task[Outcome]:
        task = asyncio.create_task(self._run_one(item, writer, group))
        self._running[item.request_index] = task
        self._in_engine.add(task)
        task.add_done_callback(self._in_engine.discard)
        return task

    def _abort(self) -> None:
        """Abort what the engine has; an outcome that it gave already is kept."""
        for task in list(self._in_engine):
            task.cancel()

    def _may_start(self) -> bool:
        watch = self.watch
        stop = self.shop.stopping.is_soft or watch.lost or watch.cancel or watch.pause
        return not stop and self._broken is None

    async def _obey(self) -> None:
        """Abort running requests when the lease is lost, the Job cancelled or time is over."""
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            if self.watch.lost or self.watch.cancel or self.shop.stopping.is_hard:
                self._abort()

    async def _run_one(self, item: Work, writer: PartWriter, group: Group | None) -> Outcome:
        outcome = await self._ask_engine(item, group)
        # From here on nothing cancels this task but the end of the whole run: an outcome that is
        # on its way into the part must not be given a second one.
        self._in_engine.discard(cast("asyncio.Task[Outcome]", asyncio.current_task()))
        if isinstance(outcome, Succeeded):
            self.shop.speed.add(outcome.completion_tokens)
        if isinstance(outcome, Cancelled) and not self.watch.cancel:
            return outcome  # given up, not cancelled: it will run again
        try:
            counts = await self.shop.call(lambda: self._add(writer, item, outcome))
        except Exception as error:
            self._break(error)
            raise
        self._results[item.request_index] = as_result(item, counts)
        return counts

    async def _ask_engine(self, item: Work, group: Group | None) -> Outcome:
        key = f"{self.shard.lease_token}.{item.request_index}"
        try:
            # What a group leaves in the prefix cache is for nobody: its salt is its own.
            salt = salt_for(self.shard.account_id, item.spec) if group is None else f"group-{key}"
            return await self.shop.engine.run(key, item.spec, salt=salt, group=group)
        except asyncio.CancelledError:
            return Cancelled()
        except EngineRequestError as error:
            return Errored(error.code, str(error))
        except Exception as error:
            self._break(error)
            raise

    def _add(self, writer: PartWriter, item: Work, outcome: Outcome) -> Outcome:
        """Give the part a request's outcome; return the one that counts."""
        stopped = "expired" if self.watch.expired else "cancelled"
        return writer.add(item, outcome, cancelled_as=stopped)

    def _break(self, error: BaseException) -> None:
        """Remember the first failure that ends this shard, and stop everything else in it."""
        if self._broken is None:
            self._broken = error
            if isinstance(error, EngineDeadError):
                # At once: room becomes free now, and what took it would be a suspect as well.
                self.shop.stopping.request("the engine died")
            self._in_engine.discard(cast("asyncio.Task[Outcome]", asyncio.current_task()))
            self._abort()

    async def _publish(self, work: list[Work], writer: PartWriter) -> None:
        if self.watch.cancel:
            await self.shop.call(lambda: self._cancel_rest(work, writer))
        keep = self._whole_prefix(work)
        shard = self.shard
        if keep < len(work):
            split_at = work[keep].request_index
            head = await self._split_off(split_at)
            if head is None:
                return  # all of it is pending again, or the lease is lost
            shard = head
            await self.shop.call(lambda: writer.cut(split_at))
        results = [self._results[item.request_index] for item in work[:keep]]
        await self._finish(shard, results, writer)

    async def _split_off(self, from_index: int) -> LeasedShard | None:
        return await self.shop.call(
            lambda: self.shop.database.run(lambda conn: split_off(conn, self.shard, from_index))
        )

    def _cancel_rest(self, work: list[Work], writer: PartWriter) -> None:
        """Give what never started its outcome: the rest of a stopped Job's shard ends here."""
        for item in work:
            if item.request_index not in self._results:
                counts = self._add(writer, item, Cancelled())
                self._results[item.request_index] = as_result(item, counts)

    def _whole_prefix(self, work: list[Work]) -> int:
        """Count the requests from the start of the shard that all have an outcome."""
        for position, item in enumerate(work):
            if item.request_index not in self._results:
                return position
        return len(work)

    async def _finish(
        self, shard: LeasedShard, results: list[RequestResult], writer: PartWriter
    ) -> None:
        part = await self._close(writer)
        failpoint("part_published")
        database = self.shop.database
        landed = await self.shop.call(
            lambda: database.run(lambda conn: finish_shard(conn, shard, results, part))
        )
        failpoint("after_finish")
        if not landed:
            log.warning("fenced off")
            with contextlib.suppress(StoreAwayError):  # an orphan is collected a day later
                await self._from_store(writer.withdraw)
            return
        log.info("shard published", extra={"requests": len(results)})
        try:
            await self._from_store(lambda: finalize_job(database, self.shop.store, shard.job_id))
        except (OSError, StoreError, StoreAwayError) as error:
            # Nothing of the shard is lost; the reconciler finishes the Job.
            log.warning("Job not finished: the object store is away", extra={"error": str(error)})

    async def _close(self, writer: PartWriter) -> PublishedPart:
        """Put the part into the store; while that is away what was computed is kept for it.

        Raises StoreAwayError when the worker has to stop, when the lease is lost or the patience
        is over.
        """
        until = self._loop.time() + self.shop.store_patience_seconds
        while True:
            try:
                return await self._from_store(writer.close)
            except StoreAwayError as error:
                log.warning("the object store is away", extra={"error": str(error)})
                if self.watch.lost or self.shop.stopping.is_hard or self._loop.time() >= until:
                    raise
            self._wakeup.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wakeup.wait(), STORE_RETRY_SECONDS)

    async def _from_store(self, work: Callable[[], T]) -> T:
        """Wait for work of the store, which may hang; not for long once the worker has to end.

        Raises StoreAwayError when that is over; a thread may then still be at it.
        """
        working = asyncio.ensure_future(self.shop.upload(work))
        try:
            while not working.done():
                if self._store_until is None and self.shop.stopping.is_hard:
                    self._store_until = self._loop.time() + STORE_LAST_SECONDS
                if self._store_until is not None and self._loop.time() >= self._store_until:
                    raise StoreAwayError("it hangs, and the worker has to end")
                await asyncio.wait([working], timeout=STORE_RETRY_SECONDS)
            return working.result()
        finally:
            working.cancel()  # what no thread has begun


def read_work(database: Database, shard: LeasedShard) -> list[Work]:
    """Read what a leased shard has to run."""
    rows = database.run(lambda conn: load_work(conn, shard))
    return [Work(row.request_index, row.custom_id, spec_from_json(row.spec)) for row in rows]


def groups_of(shard: LeasedShard, work: Sequence[Work]) -> list[Group]:
    """Give each request its place in the group that the shard is, in order of its index."""
    counts = [item.spec.sampling.n for item in work]
    *firsts, size = itertools.accumulate(counts, initial=0)
    return [Group(str(shard.lease_token), size, first) for first in firsts]


def as_result(item: Work, outcome: Outcome) -> RequestResult:
    """Say what a request's outcome means for its row and its Hold."""
    if isinstance(outcome, Succeeded):
        return RequestResult(
            request_index=item.request_index,
            state=RequestState.succeeded,
            completion_tokens=outcome.completion_tokens,
        )
    if isinstance(outcome, Errored):
        return RequestResult(
            request_index=item.request_index,
            state=RequestState.errored,
            error_code=outcome.code,
            error_message=outcome.message,
        )
    return RequestResult(request_index=item.request_index, state=RequestState.cancelled)


async def finish_as_errored(shop: Shop, shard: LeasedShard, error: Errored) -> None:
    """Publish a shard whose one request killed the engine, alone, for the third time."""
    run = ShardRun(replace(shop, store_patience_seconds=0.0), shard)
    work = await shop.call(lambda: read_work(shop.database, shard))
    writer = shop.open_part(shard)
    try:
        for item in work:
            writer.add(item, error)
        results = [as_result(item, error) for item in work]
        await run._finish(shard, results, writer)  # noqa: SLF001 (same module)
    finally:
        await shop.surely(writer.abandon)
