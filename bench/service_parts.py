"""The service's own processes for a benchmark: servers, API, reconciler, workers, and their memory.

`BareService` starts them one by one and gives direct access to the database; a whole service with
a real engine comes from tiller.local_stack instead. Only processes that were started here are
ended. `Memory` watches how much of it some processes hold.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from app.accounts.accounts import USER_SCOPES, create_account, create_key
from app.kit.db import Database
from app.kit.migrate import migrate
from app.ledger.holds import grant_tokens
from app.stack.postgres import EmbeddedPostgres
from app.stack.redis import EmbeddedRedis
from tiller.client import Client

PEPPER = "a pepper for benchmarks only"
GRANT = 10**12
MIB = 1024**2
STUB_WORKER = ("-m", "tests.faults.stub_worker")


class BareService:
    """Postgres, Redis and whatever is started besides, below one folder."""

    def __init__(self, folder: Path, models_file: Path, *, fsync: bool = True) -> None:
        """Start the servers and make an account that is rich."""
        self.folder = folder
        self.postgres = EmbeddedPostgres(folder / "postgres", options=_postgres_options(fsync))
        self.redis = EmbeddedRedis(folder / "redis")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.postgres.start()
        self.redis.start()
        migrate(self.postgres.url)
        (folder / "objects").mkdir(exist_ok=True)
        self._environment = {
            **os.environ,
            "TILLER_DATABASE_URL": self.postgres.url,
            "TILLER_REDIS_URL": self.redis.url,
            "TILLER_OBJECT_STORE": (folder / "objects").as_uri(),
            "TILLER_MODELS_FILE": str(models_file),
            "TILLER_SCRATCH_DIR": str(folder / "scratch"),
            "TILLER_KEY_PEPPER": PEPPER,
        }
        self.database = Database(self.postgres.url, size_max=4)
        with self.database.transaction() as conn:
            self.account_id = create_account(conn, "bench")
            grant_tokens(conn, self.account_id, GRANT, "for a benchmark")
            key = create_key(conn, self.account_id, PEPPER, name="bench", scopes=USER_SCOPES)
        self.api_key = key.secret

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop everything that was started here."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.database.close()
        self.redis.stop()
        self.postgres.stop()

    def start(
        self, name: str, words: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start `python WORDS`; its output goes to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *words],
                env={**self._environment, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        return process

    def start_api(self, port: int) -> tuple[psutil.Process, str]:
        """Start the API and wait until it answers; give its process and address."""
        variables = {"TILLER_PORT": str(port)}
        process = self.start("api", ["-m", "app", "serve"], variables)
        address = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None, f"see {self.folder / 'api.log'}"
            try:
                return httpx.get(f"{address}/healthz", timeout=2.0, trust_env=False).is_success
            except httpx.HTTPError:
                return False

        wait_until(answers, 60)
        return psutil.Process(process.pid), address

    def start_stub_workers(self, count: int, model: str, **variables: str) -> None:
        """Start real workers around the tests' stub engine; wait until they are ready."""
        for number in range(count):
            self.start(f"worker-{number}", [*STUB_WORKER, "--model", model], variables)

        def ready() -> bool:
            with self.database.transaction() as conn:
                row = conn.execute(
                    "SELECT count(*) AS n FROM workers WHERE state = 'ready'"
                ).fetchone()
            return row is not None and row["n"] == count

        wait_until(ready, 60)

    def client(self, address: str) -> Client:
        """Give a client of the API."""
        return Client(f"{address}/v1", self.api_key)

    def postgres_cpu_seconds(self) -> float:
        """Sum up the processor time of the server and its sessions so far."""
        assert self.postgres.pid is not None
        server = psutil.Process(self.postgres.pid)
        return sum(cpu_seconds(each) for each in (server, *server.children()))


def _postgres_options(fsync: bool) -> dict[str, str]:  # noqa: FBT001 (named by its caller)
    return {} if fsync else {"fsync": "off", "max_wal_size": "16GB", "autovacuum": "off"}


def cpu_seconds(process: psutil.Process) -> float:
    """Give the processor time of a process so far; 0 for one that is gone."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            msg = f"waited {seconds:g} s in vain"
            raise TimeoutError(msg)
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of one process at one moment: resident, and what no file backs, in MiB."""

    seconds: float
    resident: float
    anonymous: float


class Memory:
    """Samples the memory of named processes while it is entered."""

    def __init__(self, processes: Mapping[str, psutil.Process], *, pause: float = 0.25) -> None:
        """Watch these processes, every `pause` seconds."""
        self.samples: dict[str, list[Sample]] = {name: [] for name in processes}
        self._processes = processes
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()

    def most(self, name: str) -> float:
        """Give the most that a process held, resident, in MiB."""
        return max(sample.resident for sample in self.samples[name])

    def _watch(self) -> None:
        while True:
            now = time.monotonic() - self._began
            for name, process in self._processes.items():
                sample = memory_now(process.pid, now)
                if sample is not None:
                    self.samples[name].append(sample)
            if self._stop.wait(self._pause):
                return


def memory_now(pid: int, seconds: float) -> Sample | None:
    """Read what a process holds now; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = {line.split(":")[0]: line.split() for line in text.splitlines() if ":" in line}
    if "VmRSS" not in found:
        return None
    return Sample(seconds, int(found["VmRSS"][1]) / 1024, int(found["RssAnon"][1]) / 1024)


def slope(samples: Sequence[Sample], *, skip: float = 0.25) -> float:
    """Fit a line to resident memory after the first `skip` of the time; give MiB a minute."""
    late = [each for each in samples if each.seconds >= skip * samples[-1].seconds]
    if len(late) < 2:
        return 0.0
    times = [each.seconds / 60 for each in late]
    held = [each.resident for each in late]
    mean_time, mean_held = sum(times) / len(times), sum(held) / len(held)
    spread = sum((t - mean_time) ** 2 for t in times)
    if spread == 0:
        return 0.0
    joint = sum((t - mean_time) * (h - mean_held) for t, h in zip(times, held, strict=True))
    return joint / spread
