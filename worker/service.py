"""One worker process from start to end.

    register -> start engine -> prove steering -> ready -> (wake-up -> drain)* -> stop

Threads: the main thread belongs to Celery (solo pool), the engine's event loop has its own, the
heartbeat and the listener for Completions have theirs, and small pools do blocking work. The
engine is given by the caller as a function, so this module runs no matter what computes.
"""

import asyncio
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from app.catalog import ServedModel, Tokenizer
from app.catalog.norms import has_norms, store_norms
from app.jobs.claims import has_claimable_work
from app.jobs.records import LeasedShard, WorkerIdentity, WorkerStats
from app.jobs.workers import register_worker, worker_gone, worker_proved, worker_ready
from app.kit.db import RETRIED, Database, DatabaseUnavailableError
from app.kit.ids import new_uuid
from app.kit.logs import stamp_logs
from app.steering.spec import Site
from app.storage import open_store
from worker.completions import CompletionListener
from worker.drain import Drain
from worker.engine.norms import measure_norms, neutral_prompts
from worker.engine.protocol import Engine, EngineDeadError
from worker.engine.vectors import VectorCache
from worker.heartbeat import Heartbeat, Speedometer, resident_bytes
from worker.part_writer import PartWriter, job_meta
from worker.settings import WorkerSettings
from worker.shard_run import Shop
from worker.stopping import Stopping
from worker.unlisted import Gate
from worker.vectors import VectorShelf

log = logging.getLogger(__name__)
T = TypeVar("T")
StartEngine = Callable[[ServedModel, Path], Awaitable[Engine]]
Prove = Callable[[Engine, VectorCache], Awaitable[object]]

EXIT_ENGINE_DEAD = 70
EXIT_CANARY_FAILED = 71
EXIT_STUCK = 75
ROW_SECONDS = 10.0  # that a stop waits for the row that a start is making


class ToldToStopError(Exception):
    """The worker was told to stop while it started; it has taken no work."""


class SteeringNotProvenError(Exception):
    """The engine could not show that it steers; its worker's row says so."""


class WorkerService:
    """The parts of one worker, started and stopped together."""

    def __init__(
        self,
        settings: WorkerSettings,
        model: ServedModel,
        start_engine: StartEngine,
        prove: Prove,
    ) -> None:
        """Connect to Postgres and object store; the engine starts in `start`.

        `prove` raises unless the engine steers as it should; at start and every hour.
        """
        self.settings = settings
        self.model = model
        self.stopping = Stopping(settings.shutdown_seconds)
        self.takes_work = False  # True: a stop has to let what runs end
        self.worker_id = new_uuid()
        stamp_logs(worker_id=self.worker_id.hex, model=model.name)
        self._start_engine = start_engine
        self._prove_steering = prove
        self._database = Database(settings.database_url, size_max=8)
        self._store = open_store(settings.object_store)
        self._speed = Speedometer()
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="blocking")
        self._uploads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="upload")
        self._loop = asyncio.new_event_loop()
        self._engine: Engine | None = None
        self._drain: Drain | None = None
        self._listener: CompletionListener | None = None
        self._draining = threading.Lock()
        self._dying = threading.Lock()
        self._row_lock = threading.Lock()  # held while this worker's row is made
        self._last_drain = time.monotonic()
        self._scratch = claim_scratch(settings.scratch_dir)
        self._heartbeat = Heartbeat(
            self._database,
            self.worker_id,
            beat_seconds=settings.heartbeat_seconds,
            lease_seconds=settings.lease_seconds,
            stopping=self.stopping,
            stats=self._stats,
        )

    def start(self) -> None:
        """Register, start the engine, prove that it steers, become ready.

        Raises what the engine's start raised, SteeringNotProvenError, or ToldToStopError: the
        process must then end.
        """
        threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True).start()
        identity = WorkerIdentity(
            worker_id=self.worker_id,
            model=self.model.name,
            model_revision=self.model.revision,
            dtype=self.model.dtype,
            engine=None,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        with self._row_lock:
            if self.stopping.is_soft:
                raise ToldToStopError
            self._database.run(lambda conn: register_worker(conn, identity))
        self._heartbeat.start()
        engine = self._call(self._start_engine(self.model, self._scratch))
        self._engine = engine
        self._call(self._prove(engine))
        self._measure_norms(engine)
        identity = identity.with_engine(engine.facts.engine)
        shelf = self._build_shelf()
        self._drain = self._call(self._build_drain(engine, identity, shelf))
        self._listener = self._call(self._build_listener(engine, shelf))
        self.takes_work = True
        if self.stopping.is_soft:
            raise ToldToStopError
        self._database.run(lambda conn: worker_ready(conn, identity, mode=engine.facts.mode))
        self._loop.call_soon_threadsafe(self._listener.start)
        asyncio.run_coroutine_threadsafe(self._watch_engine(engine), self._loop)
        threading.Thread(target=self._watchdog, name="watchdog", daemon=True).start()

    def drain(self) -> None:
        """Run everything that can be leased now; ends the process when the engine died."""
        if self._drain is None or self.stopping.is_soft:
            return
        with self._draining:
            self._last_drain = time.monotonic()
            try:
                self._call(self._drain.run())
            except EngineDeadError as error:
                log.error("engine died", exc_info=error)  # noqa: TRY400 (cause is logged)
                self.die(EXIT_ENGINE_DEAD)
            except (*RETRIED, DatabaseUnavailableError) as error:
                # The reconciler wakes us again when Postgres is back.
                log.warning("drain gave up", extra={"error": str(error)})
            self._last_drain = time.monotonic()

    def stop(self) -> None:
        """Stop everything in order; nothing of this worker is left when it returns."""
        self.stopping.request("stopped")
        if self._listener is not None:
            listener = self._listener
            self._quietly(lambda: self._call(listener.finish()))
        self._heartbeat.stop()  # before the row says gone: a beat would say that it is back
        self._quietly(self._mark_gone)
        if self._engine is not None:
            engine = self._engine
            self._quietly(lambda: self._call(engine.shutdown(), timeout=15))
        self._loop.call_soon_threadsafe(self._loop.stop)
        for pool in (self._threads, self._uploads):
            pool.shutdown(wait=False, cancel_futures=True)
        self._database.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def die(self, code: int) -> None:
        """End the process now with this exit code; the supervisor starts a new one."""
        self.stopping.abort("dying")
        with self._dying:  # held to the end: who comes second waits for the first
            try:
                self.stop()
            except Exception:
                log.exception("could not stop in order")
            logging.shutdown()
            os._exit(code)

    def poke(self) -> None:
        """Let running shards see that a stop was asked for."""
        if self._drain is not None:
            self._drain.poke()

    def _mark_gone(self) -> None:
        # A row that is being made at this moment would otherwise not be found, and stay.
        had = self._row_lock.acquire(timeout=ROW_SECONDS)
        try:
            self._database.run(lambda conn: worker_gone(conn, self.worker_id), attempts=2)
        finally:
            if had:
                self._row_lock.release()

    def _call(self, work: Coroutine[Any, Any, T] | Awaitable[T], timeout: float | None = None) -> T:
        async def awaited() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(timeout)

    def _quietly(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 (stopping goes on whatever one step says)
            log.warning("while stopping", extra={"error": repr(error)})

    def _build_shelf(self) -> VectorShelf:
        folder = self._scratch / "vectors"
        return VectorShelf(
            self._database, VectorCache(folder), folder, self.settings.vector_cache_bytes
        )

    async def _build_listener(self, engine: Engine, shelf: VectorShelf) -> CompletionListener:
        return CompletionListener(
            self._database,
            self.settings.redis_url,
            worker_id=self.worker_id,
            engine=engine,
            shelf=shelf,
            gate=Gate(self._database, self._store, self.model, self.settings.limits),
            speed=self._speed,
            stopping=self.stopping,
            logprob_entries_max=self.settings.logprob_entries_running,
        )

    async def _build_drain(
        self, engine: Engine, identity: WorkerIdentity, shelf: VectorShelf
    ) -> Drain:
        settings, facts = self.settings, engine.facts
        spool = self._scratch / "spool"

        def open_part(shard: LeasedShard) -> PartWriter:
            meta = job_meta(shard, facts)
            return PartWriter(spool, self._store, meta, shard, facts)

        shop = Shop(
            database=self._database,
            store=self._store,
            engine=engine,
            shelf=shelf,
            room=asyncio.Semaphore(max(1, int(facts.max_num_seqs * settings.in_flight_factor))),
            threads=self._threads,
            uploads=self._uploads,
            speed=self._speed,
            stopping=self.stopping,
            store_patience_seconds=settings.store_patience_seconds,
            open_part=open_part,
        )
        return Drain(
            shop,
            identity,
            self._heartbeat,
            lease_seconds=settings.lease_seconds,
            poll_seconds=settings.claim_poll_seconds,
            shards_max=settings.shards_in_flight_max,
        )

    async def _prove(self, engine: Engine) -> None:
        """Let the engine prove that it steers, and write down how that ended.

        Raises SteeringNotProvenError; EngineDeadError of an engine that died, which says nothing
        about steering.
        """
        try:
            await self._prove_steering(engine, VectorCache(self._scratch / "vectors"))
        except EngineDeadError:
            raise
        except Exception as error:
            if not self.stopping.is_soft:  # else the engine was taken away from the proof
                await asyncio.to_thread(self._quietly, lambda: self._note_proof("failed"))
            raise SteeringNotProvenError(str(error)) from error
        await asyncio.to_thread(self._note_proof, "passed")

    def _measure_norms(self, engine: Engine) -> None:
        """Measure the typical norms of the residual stream, once for these weights."""
        model, database = self.model, self._database
        if Site.resid_post not in engine.facts.site_widths:
            return
        if database.run(lambda conn: has_norms(conn, model)):
            return
        prompts = neutral_prompts(
            Tokenizer(model.tokenizer_path).encode,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
        )
        norms = self._call(measure_norms(engine, prompts))
        if norms is None:
            log.warning("typical norms not measured", extra={"model": model.name})
            return
        database.run(lambda conn: store_norms(conn, model, norms))

    def _note_proof(self, outcome: str) -> None:
        self._database.run(lambda conn: worker_proved(conn, self.worker_id, outcome))

    async def _watch_engine(self, engine: Engine) -> None:
        """Notice an engine that died while idle, and prove steering every hour."""
        proved_at = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            if self.stopping.is_soft:
                return  # who stops the worker also shuts the engine down
            try:
                await engine.check_health()
            except EngineDeadError as error:
                if not self._draining.locked():  # a drain reports the death itself
                    log.error("engine died while idle", exc_info=error)  # noqa: TRY400
                    threading.Thread(target=self.die, args=(EXIT_ENGINE_DEAD,)).start()
                    return
            if time.monotonic() - proved_at > self.settings.canary_seconds:
                proved_at = time.monotonic()
                try:
                    await self._prove(engine)
                except SteeringNotProvenError:
                    log.exception("steering is no longer proven: taking no more work")
                    threading.Thread(target=self.die, args=(EXIT_CANARY_FAILED,)).start()
                    return
                except EngineDeadError:
                    continue  # the next look at its health says so
                except (*RETRIED, DatabaseUnavailableError) as error:
                    log.warning("proof not written down", extra={"error": str(error)})

    def _watchdog(self) -> None:
        """End a process that no wake-up reaches although there is work for its model."""
        limit = self.settings.watchdog_seconds
        while not self.stopping.wait(min(10.0, limit / 4)):
            if self._draining.locked() or time.monotonic() - self._last_drain < limit:
                continue
            try:
                waiting = self._database.run(
                    lambda conn: has_claimable_work(conn, self.model.name), attempts=1
                )
            except (*RETRIED, DatabaseUnavailableError):
                continue
            if waiting and not self._draining.locked():
                log.error("work is waiting and no wake-up arrives: starting anew")
                self.die(EXIT_STUCK)
            self._last_drain = time.monotonic()

    def _in_flight(self) -> int:
        of_jobs = self._drain.requests_in_flight if self._drain else 0
        return of_jobs + (self._listener.in_flight if self._listener else 0)

    def _stats(self) -> WorkerStats:
        rss = resident_bytes()
        if rss > self.settings.rss_bytes_max:
            self.stopping.request("over its memory limit")
        return WorkerStats(
            rss_bytes=rss,
            requests_running=self._in_flight(),
            tokens_per_second=self._speed.tokens_per_second(),
        )


def claim_scratch(folder: Path) -> Path:
    """Make this process's own scratch folder, and delete those of processes that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("worker-*"):
        pid = old.name.removeprefix("worker-")
        if not Path("/proc", pid).exists():
            shutil.rmtree(old, ignore_errors=True)
    own = folder / f"worker-{os.getpid()}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    return own
