"""A whole Tiller for fault runs: servers, reconciler and supervised worker processes.

Servers are direct children of pytest and may be killed and started again at the same address.
Workers are processes that a thread starts again when they end, as the stack's supervisor does.
Everything carries a mark in its environment, so that what is left over can be found.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import psycopg

from app.jobs.records import Job
from app.kit.db import Database
from app.kit.migrate import migrate
from app.queue import Waker
from app.reconcile.loop import reconcile_until
from app.settings import Settings
from app.stack.postgres import EmbeddedPostgres
from app.stack.redis import EmbeddedRedis
from app.storage import job_folder, open_store
from tests.checker import check_everything
from tests.fixtures.api import settings_for
from tests.fixtures.builders import Builders, insert_job
from tests.fixtures.history import record_history
from tests.rules.source_tree import ROOT

MARK = "TILLER_TEST_CLUSTER"
STUB = "tests.faults.stub_worker"
FAST = {
    "TILLER_LEASE_SECONDS": "2",
    "TILLER_HEARTBEAT_SECONDS": "0.3",
    "TILLER_CLAIM_POLL_SECONDS": "0.1",
    "TILLER_SHUTDOWN_SECONDS": "5",
}
RECONCILE_SECONDS = 0.3


class WorkerProcess:
    """One worker that is started again whenever it ends."""

    def __init__(
        self, command: list[str], environment: dict[str, str], log: Path, *, failpoint: str = ""
    ) -> None:
        """Start it; a `failpoint` that kills is armed for the first start only."""
        self._command = command
        self._environment = environment
        self._log = log
        self._failpoint = failpoint
        self.exits: list[int] = []
        self.keep = True
        self.process = self._start()

    @property
    def pid(self) -> int:
        """Process id of the present start."""
        return self.process.pid

    def look(self) -> None:
        """Start it again if it ended."""
        status = self.process.poll()
        if status is None or not self.keep:
            return
        if not self._failpoint.endswith(":stop"):
            self._failpoint = ""
        self.process = self._start()
        self.exits.append(status)  # last: whoever waits for it then sees the new process

    def send(self, number: signal.Signals) -> int:
        """Send a signal; return the process id that got it."""
        pid = self.pid
        self.process.send_signal(number)
        return pid

    def end(self) -> None:
        """Kill it and wait for it, also when it was stopped."""
        self.keep = False
        self.process.kill()
        self.process.wait()

    def is_stopped(self) -> bool:
        """Tell whether it stands still (SIGSTOP)."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def log_text(self) -> str:
        """Read everything that its starts have logged."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = {**self._environment}
        if self._failpoint:
            environment["TILLER_FAILPOINT"] = self._failpoint
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


class Cluster:
    """Postgres, Redis, object store, reconciler and any number of workers of the model tiny."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the servers and the reconciler; workers are started one by one."""
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.postgres = EmbeddedPostgres(folder / "postgres")
        self.redis = EmbeddedRedis(folder / "redis")
        self.workers: list[WorkerProcess] = []
        self.killed_servers: list[int] = []
        self._stop = threading.Event()
        self._stop_reconciler = threading.Event()
        self._threads: list[threading.Thread] = []
        self.postgres.start()
        self.redis.start()
        migrate(self.postgres.url)
        with psycopg.connect(self.postgres.url) as conn:
            record_history(conn)
        environment = {**FAST, **(environment or {})}
        self.settings: Settings = settings_for(
            folder,
            database_url=self.postgres.url,
            redis_url=self.redis.url,
            reconcile_seconds=RECONCILE_SECONDS,
            lease_seconds=float(environment["TILLER_LEASE_SECONDS"]),
            **(settings or {}),
        )
        self.database = Database(self.postgres.url, size_max=8)
        self.store = open_store(self.settings.object_store)
        self.waker = Waker(self.redis.url)
        self.builders = Builders(self.database)
        self._environment = {**os.environ, **environment, **self._addresses()}
        self._spawn(self._supervise, "supervisor")

    def start_reconciler(self) -> None:
        """Run the reconciler's rounds in a thread, until `stop_reconciler`."""
        self._stop_reconciler = stop = threading.Event()
        self._spawn(
            lambda: reconcile_until(stop, self.settings, self.database, self.store, self.waker),
            "reconciler",
        )

    def stop_reconciler(self) -> None:
        """Let no round begin any more."""
        self._stop_reconciler.set()

    def start_worker(
        self, module: str = STUB, *, failpoint: str = "", **environment: str
    ) -> WorkerProcess:
        """Start a worker process and supervise it."""
        worker = WorkerProcess(
            [sys.executable, "-m", module, "--model", "tiny"],
            {**self._environment, **environment},
            self.folder / f"worker-{len(self.workers)}.log",
            failpoint=failpoint,
        )
        self.workers.append(worker)
        return worker

    def start_workers(self, count: int, **environment: str) -> None:
        """Start workers and wait until all of them are ready."""
        for _ in range(count):
            self.start_worker(**environment)
        self.wait_ready()

    def wait_ready(self, seconds: float = 60.0) -> None:
        """Wait until every worker's present process is ready to lease."""
        self.wait(
            lambda: {worker.pid for worker in self.workers} <= self.ready_pids(),
            "workers to be ready",
            seconds,
        )

    def ready_pids(self) -> set[int]:
        """List the processes that are ready by their rows."""
        return {r["pid"] for r in self.rows("SELECT pid FROM workers WHERE state = 'ready'")}

    def a_job(self, *, wake: bool = True, **fields: Any) -> Job:
        """Store a Job as intake does, and wake the workers after the commit."""

        def insert(conn: Any) -> Job:
            return insert_job(conn, account_id, **fields)

        account_id = self.builders.an_account(balance=10_000_000)
        job = self.database.run(insert)
        if wake:
            self.waker.wake("tiny")
        return job

    def rows(self, query: Any, **values: Any) -> list[dict[str, Any]]:
        """Read rows, waiting for Postgres if it is away."""
        return self.database.run(lambda conn: conn.execute(query, values).fetchall())

    def job(self, job: Job) -> Job:
        """Read a Job as it is now."""
        return self.builders.job(job.id)

    def wait_finished(self, *jobs: Job, seconds: float = 60.0) -> None:
        """Wait until Jobs are terminal."""
        ids = [job.id for job in jobs]

        def open_jobs() -> list[dict[str, Any]]:
            return self.rows(
                "SELECT 1 FROM jobs WHERE id = ANY(%(ids)s) AND finished_at IS NULL", ids=ids
            )

        self.wait(lambda: not open_jobs(), "Jobs to end", seconds)

    def leased_pids(self) -> set[int]:
        """List the processes that hold leases now."""
        rows = self.rows(
            """
            SELECT DISTINCT pid FROM shards JOIN workers ON workers.id = worker_id
            WHERE shards.state = 'leased' AND lease_expires_at > clock_timestamp()
            """
        )
        return {row["pid"] for row in rows}

    def wait_busy(self, seconds: float = 60.0) -> WorkerProcess:
        """Wait until a living worker holds a lease, and return that worker."""

        def busy() -> WorkerProcess | None:
            pids = self.leased_pids()
            return next((w for w in self.workers if w.pid in pids and not w.is_stopped()), None)

        return self.wait(busy, "a worker with a lease", seconds)

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
        """Return the first true answer of `condition`; fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while not (answer := condition()):
            assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what}"
            time.sleep(0.02)
        return answer

    def kill_postgres(self) -> None:
        """Kill the postmaster and start it again."""
        process = self.postgres.process
        assert process is not None
        process.kill()
        process.wait()
        self.postgres.start()

    def kill_redis(self) -> None:
        """Kill Redis; `redis.start()` brings an empty one."""
        process = self.redis.process
        assert process is not None
        process.kill()
        process.wait()

    def files_of(self, job_id: UUID, token: int) -> list[str]:
        """List the objects in a Job's folder that were published under a token."""
        names = [meta.key for meta in self.store.list(job_folder(job_id))]
        return [name for name in names if f".{token}." in name]

    def check(self) -> None:
        """Check every invariant, files included, and that no Hold is open after the last Job."""
        check_everything(self.database, self.store)
        (row,) = self.rows("SELECT coalesce(sum(held), 0)::bigint AS held FROM accounts")
        (live,) = self.rows("SELECT count(*) AS live FROM jobs WHERE finished_at IS NULL")
        assert live["live"] == 0
        assert row["held"] == 0, "Holds are open although every Job ended"

    def marked(self) -> list[psutil.Process]:
        """List everything alive that a worker of this cluster is or has started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = process.environ().get(MARK) == self.mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        """Stop everything; nothing that was started is left."""
        self._stop.set()
        self._stop_reconciler.set()
        for thread in self._threads:
            thread.join(30)
        for worker in self.workers:
            worker.end()
        self.database.close()
        self.waker.close()
        self.redis.stop()
        self.postgres.stop()
        shutil.rmtree(self.folder / "postgres", ignore_errors=True)

    def _addresses(self) -> dict[str, str]:
        return {
            MARK: self.mark,
            "TILLER_DATABASE_URL": self.settings.database_url,
            "TILLER_REDIS_URL": self.settings.redis_url,
            "TILLER_OBJECT_STORE": self.settings.object_store,
            "TILLER_MODELS_FILE": str(self.settings.models_file),
            "TILLER_SCRATCH_DIR": str(self.folder / "scratch"),
        }

    def _spawn(self, body: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _supervise(self) -> None:
        while not self._stop.wait(0.05):
            for worker in list(self.workers):
                worker.look()


@contextlib.contextmanager
def running_cluster(folder: Path, **options: Any) -> Iterator[Cluster]:
    """Give a cluster with a reconciler, and stop it at the end."""
    cluster = Cluster(folder, **options)
    try:
        cluster.start_reconciler()
        yield cluster
    finally:
        cluster.close()
