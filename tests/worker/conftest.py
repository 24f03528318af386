"""A worker's inside without its process: Drain and ShardRun around an engine that tests hold."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.completions.spec import RequestSpec
from app.jobs.records import LeasedShard, PublishedPart, WorkerIdentity, WorkerStats
from app.kit.db import Database
from app.storage import ObjectStore, open_store
from tests.faults.stub_engine import StubEngine
from tests.fixtures.builders import Builders
from worker.drain import Drain
from worker.engine.vectors import VectorCache
from worker.heartbeat import Heartbeat, Speedometer
from worker.outcomes import Outcome
from worker.part_writer import PartWriter, StoreAwayError, job_meta
from worker.shard_run import ShardRun, Shop
from worker.stopping import Stopping
from worker.vectors import VectorShelf

ROOM = 8


class HeldEngine(StubEngine):
    """Answers nothing before `release`; knows what it has, in the order in which it came."""

    def __init__(self) -> None:
        super().__init__(seconds_per_request=0)
        self.gate = asyncio.Event()
        self.present = asyncio.Event()  # the gate of those that run now
        self.begun: list[str] = []
        self.inside: list[str] = []
        self.most = 0

    @property
    def running(self) -> int:
        """Count the requests that it has now."""
        return len(self.inside)

    async def run(self, key: str, spec: RequestSpec, **options: Any) -> Outcome:
        self.begun.append(key)
        self.inside.append(key)
        self.most = max(self.most, self.running)
        try:
            await self._wait()
            return await super().run(key, spec, **options)
        finally:
            self.inside.remove(key)

    async def _wait(self) -> None:
        gates = [asyncio.create_task(each.wait()) for each in (self.gate, self.present)]
        try:
            await asyncio.wait(gates, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for gate in gates:
                gate.cancel()

    def release(self) -> None:
        """Answer everything from now on."""
        self.gate.set()

    def die(self) -> None:
        """Be dead from now on; what it has finds out when it is released."""
        self._dead = True

    def answer_those_that_run(self) -> None:
        """Answer what runs now, and hold what comes after."""
        self.present.set()
        self.present = asyncio.Event()


class KnownPart(PartWriter):
    """The real writer; says whether the store refused it."""

    was_refused = False

    def close(self) -> PublishedPart:
        try:
            return super().close()
        except StoreAwayError:
            self.was_refused = True
            raise


class Bench:
    """One worker's parts in this process; made inside the running event loop."""

    def __init__(self, database: Database, builders: Builders, folder: Path) -> None:
        self.database = database
        self.folder = folder
        self.store: ObjectStore = open_store((folder / "objects").as_uri())
        self.engine = HeldEngine()
        self.stopping = Stopping(60.0)
        self.threads = ThreadPoolExecutor(max_workers=4)
        self.identity: WorkerIdentity = builders.a_worker()
        self.spool = folder / "spool"
        self.parts: list[KnownPart] = []
        vectors = folder / "vectors"
        self.shop = Shop(
            database=database,
            store=self.store,
            engine=self.engine,
            shelf=VectorShelf(database, VectorCache(vectors), vectors, 10**6),
            room=asyncio.Semaphore(ROOM),
            threads=self.threads,
            uploads=self.threads,
            speed=Speedometer(),
            stopping=self.stopping,
            store_patience_seconds=60.0,
            open_part=self.open_part,
        )
        self.heartbeat = Heartbeat(
            database,
            self.identity.worker_id,
            beat_seconds=0.05,
            lease_seconds=30.0,
            stopping=self.stopping,
            stats=WorkerStats,
        )

    def open_part(self, shard: LeasedShard) -> PartWriter:
        """Open the real writer."""
        facts = self.engine.facts
        part = KnownPart(self.spool, self.store, job_meta(shard, facts), shard, facts)
        self.parts.append(part)
        return part

    @property
    def parts_refused(self) -> int:
        """Count the parts that the store did not take at first."""
        return sum(part.was_refused for part in self.parts)

    def drain(self, *, shards_max: int = 4, **changes: Any) -> Drain:
        """Make a Drain over these parts."""
        return Drain(
            replace(self.shop, **changes),
            self.identity,
            self.heartbeat,
            lease_seconds=30.0,
            poll_seconds=0.02,
            shards_max=shards_max,
        )

    def take_store_away(self) -> None:
        """Move the store's folder to another place, and put a file where it was."""
        objects = self.folder / "objects"
        objects.rename(self.folder / "objects-away")
        objects.write_text("a file where the store's folder was")

    async def start_without_store(
        self, work: Coroutine[Any, Any, None], *, parts: int = 1
    ) -> "asyncio.Task[None]":
        """Start work while the store is away; returns when so many parts were refused."""
        self.take_store_away()
        self.engine.release()
        task = asyncio.create_task(work)
        await self.until(lambda: self.parts_refused == parts)
        return task

    def bring_store_back(self) -> None:
        """Undo `take_store_away`."""
        (self.folder / "objects").unlink()
        (self.folder / "objects-away").rename(self.folder / "objects")

    def lease(self, builders: Builders, **changes: Any) -> ShardRun:
        """Lease the next shard and watch its lease."""
        run = ShardRun(replace(self.shop, **changes), builders.a_lease(self.identity))
        self.heartbeat.watch(run.watch)
        return run

    def left_in_spool(self) -> list[Path]:
        """List what lies in the spool folder."""
        return [path for path in self.spool.rglob("*") if path.is_file()]

    def objects(self) -> list[Path]:
        """List the files of the object store."""
        return [path for path in (self.folder / "objects").rglob("*") if path.is_file()]

    async def until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        """Let the loop run until the condition holds."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 (Postgres sets no event)
                await asyncio.sleep(0.005)


def shards(database: Database) -> list[dict[str, Any]]:
    """Say of every shard where it is."""
    with database.transaction() as conn:
        return conn.execute(
            """
            SELECT first_index, end_index, state, attempt, engine_deaths FROM shards
            ORDER BY first_index
            """
        ).fetchall()


def states(database: Database, *, deaths: bool = False) -> list[tuple[Any, ...]]:
    """Say of every shard its range, state and attempt, and how many engines died under it."""
    return [tuple(row.values())[: 5 if deaths else 4] for row in shards(database)]


@pytest.fixture
def bench_of(database, builders, tmp_path):
    """A context manager that gives a Bench with a beating heart."""

    @asynccontextmanager
    async def open_bench() -> AsyncIterator[Bench]:
        (tmp_path / "objects").mkdir()
        bench = Bench(database, builders, tmp_path)
        bench.heartbeat.start()
        try:
            yield bench
        finally:
            await asyncio.to_thread(bench.heartbeat.stop)
            bench.threads.shutdown()

    return open_bench
