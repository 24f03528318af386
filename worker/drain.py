"""Drain: lease shards and run them until nothing is left to lease.

Several shards stream through one engine at once: as soon as the engine has all requests of one,
the next is leased, so the batch never runs dry and at most one leased shard waits. A shard
during which an engine died before runs alone: if the engine dies again, the culprit is known.
A group of a reproducible Job runs alone, too: its results must not depend on what runs beside it.
When the engine dies, only shards that it had requests of are suspects. The others, which may be
waiting for the object store, end as they do when a worker is stopped.
"""

import asyncio
import logging
from collections.abc import Callable
from uuid import UUID

from app.jobs.claims import (
    claim_shards,
    give_back_shard,
    leave_to_newer,
    report_engine_death,
)
from app.jobs.records import LeasedShard, WorkerIdentity
from app.kit.db import ATTEMPTS_MAX, RETRIED, Conn, DatabaseUnavailableError
from app.steering.spec import NewerSpecError
from app.storage import StoreError
from worker.engine.protocol import EngineDeadError
from worker.heartbeat import Heartbeat
from worker.outcomes import Errored
from worker.part_writer import StoreAwayError
from worker.shard_run import ShardRun, Shop, finish_as_errored

log = logging.getLogger(__name__)

STORE_LOOK_SECONDS = 5.0  # more would keep the drain from looking after what runs
ENGINE_DIED = Errored(
    "engine_died",
    "The engine process died three times with this request alone in it; the other requests of "
    "the Job were not affected. Send it with a shorter prompt or fewer captured layers.",
)


class Drain:
    """One worker's way of emptying the queue of its model."""

    def __init__(
        self,
        shop: Shop,
        identity: WorkerIdentity,
        heartbeat: Heartbeat,
        *,
        lease_seconds: float,
        poll_seconds: float,
        shards_max: int,
    ) -> None:
        """Prepare; `run` does the work and may be called again and again."""
        self.shop = shop
        self._identity = identity
        self._heartbeat = heartbeat
        self._lease_seconds = lease_seconds
        self._poll_seconds = poll_seconds
        self._shards_max = shards_max
        self._active: dict[asyncio.Task[None], ShardRun] = {}
        # Suspects and groups: leased, and each runs with nothing beside it.
        self._loners: list[ShardRun] = []
        self._store_is_away = False  # as far as the last part knew
        self._of_newer_code: set[UUID] = set()  # Jobs that this worker cannot read

    async def run(self) -> None:
        """Lease and run until nothing can be leased. Raises EngineDeadError after reporting it.

        Whatever it raises, nothing is left running and no lease is kept alive any more.
        """
        try:
            while await self._go_on():
                await self._wait()
                if not self.requests_in_flight:  # else they say so
                    await self.shop.engine.check_health()
        except EngineDeadError:
            await self._report_death()
            raise
        finally:
            await self._abandon()
            await self._return_loners()

    async def _go_on(self) -> bool:
        """Lease more if there is more; False when nothing runs."""
        try:
            await self._fill()
        except (*RETRIED, DatabaseUnavailableError) as error:
            if not self._active:
                raise
            log.warning("cannot lease now", extra={"error": str(error)})
        return bool(self._active)

    @property
    def requests_in_flight(self) -> int:
        """How many requests the engine has now."""
        return sum(run.in_flight for run in list(self._active.values()))

    def poke(self) -> None:
        """Make every running shard look at the stop events; callable from any thread."""
        for run in list(self._active.values()):
            run.poke()

    async def _fill(self) -> None:
        while self._may_lease():
            if self._store_is_away and not await self._store_is_back():
                return  # what is computed now could not be published
            if self._loners:
                if not self._active:
                    self._start(self._loners.pop())
                return
            shards = await self.shop.call(self._claim)
            if not shards:
                return
            run = ShardRun(self.shop, shards[0])
            self._heartbeat.watch(run.watch)
            if run.shard.run_alone:
                self._loners.append(run)
            else:
                self._start(run)

    def _may_lease(self) -> bool:
        if self.shop.stopping.is_soft or len(self._active) >= self._shards_max:
            return False
        return all(run.fed.is_set() and not run.shard.run_alone for run in self._active.values())

    def _claim(self) -> list[LeasedShard]:
        # While shards run they must be looked after, and the next look is soon.
        attempts = 1 if self._active else ATTEMPTS_MAX
        return self.shop.database.run(self._claim_one, attempts=attempts)

    def _claim_one(self, conn: Conn) -> list[LeasedShard]:
        return claim_shards(
            conn,
            self._identity,
            lease_seconds=self._lease_seconds,
            shards_max=1,
            without=self._of_newer_code,
        )

    def _start(self, run: ShardRun) -> None:
        self._active[asyncio.create_task(run.run())] = run

    async def _wait(self) -> None:
        fed = [
            asyncio.create_task(run.fed.wait())
            for run in self._active.values()
            if not run.fed.is_set()
        ]
        ended, _ = await asyncio.wait(
            [*self._active, *fed],
            timeout=self._poll_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for waiting in fed:
            waiting.cancel()
        done = [task for task in self._active if task in ended]
        if self.shop.stopping.is_soft:
            self.poke()
        deaths = [task for task in done if isinstance(task.exception(), EngineDeadError)]
        for task in done:
            if task in deaths:
                continue  # stays in _active, to be reported with all the others
            await self._end(task)
        if deaths:
            raise EngineDeadError("the engine process died") from deaths[0].exception()

    async def _end(self, task: "asyncio.Task[None]") -> None:
        run, error = self._active.pop(task), task.exception()
        job = {"job_id": run.shard.job_id.hex}
        if isinstance(error, StoreAwayError):
            # Nothing that the shard did: it comes back whole.
            log.error("the object store stayed away: shard given back", extra=job)
            self._store_is_away = True
            await self._return(run)
            return
        if isinstance(error, NewerSpecError):
            log.error("shard left to a newer worker", exc_info=error, extra=job)
            self._of_newer_code.add(run.shard.job_id)
            await self._return(run, leave_to_newer)
            return
        if error is not None:
            # The lease runs out and the shard comes back, split. Nothing was published.
            log.error("shard failed", exc_info=error, extra=job)
        self._heartbeat.forget(run.watch)

    async def _store_is_back(self) -> bool:
        try:
            looking = self.shop.upload(self._store_answers)
            return await asyncio.wait_for(looking, STORE_LOOK_SECONDS)
        except TimeoutError:
            log.warning("leasing nothing: the object store hangs")
            return False

    def _store_answers(self) -> bool:
        try:
            self.shop.store.check()
        except (OSError, StoreError) as error:
            log.warning("leasing nothing: the object store is away", extra={"error": str(error)})
            return False
        self._store_is_away = False
        return True

    async def _report_death(self) -> None:
        """Tell Postgres under which shards the engine died; error a proven killer.

        The other shards end as in a stop: what was computed is published if the store takes it in
        time, the rest is given back whole.
        """
        self.shop.stopping.request("the engine died")  # nothing is started or taken any more
        suspects = {task: run for task, run in self._active.items() if run.is_suspect}
        alone = len(suspects) == 1
        for task, run in suspects.items():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            try:
                if await self._is_to_blame(run.shard, alone=alone):
                    await finish_as_errored(self.shop, run.shard, ENGINE_DIED)
            except (*RETRIED, DatabaseUnavailableError, StoreAwayError) as error:
                # The lease runs out, and the shard comes back split, only not as a suspect.
                log.warning("engine death not reported", extra={"error": str(error)})
            self._drop(task)
        while self._active:
            await self._wait()

    async def _abandon(self) -> None:
        """Stop every running shard; their leases run out."""
        for task in list(self._active):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._drop(task)

    async def _return_loners(self) -> None:
        """Give leased shards back that wait for the engine to be theirs alone."""
        while self._loners:
            await self._return(self._loners.pop())

    async def _return(
        self, run: ShardRun, give_back: Callable[[Conn, LeasedShard], bool] = give_back_shard
    ) -> None:
        """Give a leased shard back whole; its attempt is not counted."""
        shard = run.shard
        try:
            await self.shop.call(
                lambda: self.shop.database.run(lambda conn: give_back(conn, shard))
            )
        except (*RETRIED, DatabaseUnavailableError) as error:
            log.warning("shard not given back", extra={"error": str(error)})
        self._heartbeat.forget(run.watch)

    def _drop(self, task: "asyncio.Task[None]") -> ShardRun:
        run = self._active.pop(task)
        self._heartbeat.forget(run.watch)
        return run

    async def _is_to_blame(self, shard: LeasedShard, *, alone: bool) -> bool:
        return await self.shop.call(
            lambda: self.shop.database.run(
                lambda conn: report_engine_death(conn, shard, alone=alone)
            )
        )
