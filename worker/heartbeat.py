"""The heartbeat: one thread that renews leases and brings back what users and operators asked.

It has its own connection, so a slow engine or a blocked event loop never costs a lease. A lease
that is missing from the answer was lost: its shard stops at once, because whatever it publishes
would be refused by the fence.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

from app.jobs.claims import renew_leases
from app.jobs.records import Control, WorkerStats
from app.jobs.workers import worker_heartbeat
from app.kit.db import RETRIED, Database, DatabaseUnavailableError
from worker.stopping import Stopping

log = logging.getLogger(__name__)


class LeaseWatch:
    """What the heartbeat learned about one lease; set by its thread, read by the shard's run."""

    def __init__(self, token: int, changed: Callable[[], None]) -> None:
        """Watch the lease `token`; `changed` is called from the heartbeat's thread."""
        self.token = token
        self.lost = False
        self.cancel = False
        self.pause = False
        self.expired = False
        self._changed = changed

    def update(self, control: Control | None) -> None:
        """Take over what Postgres said; None means that the lease is lost."""
        before = (self.lost, self.cancel, self.pause)
        if control is None:
            self.lost = True
        else:
            self.cancel, self.pause = control.cancel, control.pause
            self.expired = control.expired
        if (self.lost, self.cancel, self.pause) != before:
            self._changed()


class Heartbeat:
    """Beats every few seconds until `stop`; keeps the leases of all watched shards alive."""

    def __init__(
        self,
        database: Database,
        worker_id: UUID,
        *,
        beat_seconds: float,
        lease_seconds: float,
        stopping: Stopping,
        stats: Callable[[], WorkerStats],
    ) -> None:
        """Prepare the thread; `stats` is asked at every beat for the worker's row."""
        self._database = database
        self._worker_id = worker_id
        self._beat_seconds = beat_seconds
        self._lease_seconds = lease_seconds
        self._stopping = stopping
        self._stats = stats
        self._watches: dict[int, LeaseWatch] = {}
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start beating."""
        self._thread.start()

    def stop(self) -> None:
        """Stop beating and wait for the thread, if it was started; it beats no more if it is."""
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def watch(self, watch: LeaseWatch) -> None:
        """Keep this lease alive from now on."""
        with self._lock:
            self._watches[watch.token] = watch

    def forget(self, watch: LeaseWatch) -> None:
        """Stop renewing this lease."""
        with self._lock:
            self._watches.pop(watch.token, None)

    @property
    def leases(self) -> int:
        """How many leases are held now."""
        return len(self._watches)

    def _run(self) -> None:
        while not self._done.wait(self._beat_seconds):
            try:
                self._beat()
            except (*RETRIED, DatabaseUnavailableError) as error:
                # Postgres is away. Running requests go on: the fence decides when it is back.
                log.warning("heartbeat failed", extra={"error": str(error)})
            except Exception:
                # A thread that ended here would let every lease run out without anybody knowing.
                log.exception("heartbeat failed")

    def _beat(self) -> None:
        with self._lock:
            watches = dict(self._watches)
        with self._database.transaction() as conn:
            control = worker_heartbeat(conn, self._worker_id, self._stats())
            answers = (
                renew_leases(conn, self._worker_id, list(watches), self._lease_seconds)
                if watches
                else {}
            )
        if control.drain:
            self._stopping.request("drained by an operator")
        for token, watch in watches.items():
            # A shard that finished during this beat is no longer watched: its lease is not lost.
            if token in answers or token in self._watches:
                watch.update(answers.get(token))


def resident_bytes() -> int:
    """Read how much memory this process has resident, in bytes."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


class Speedometer:
    """Generated tokens a second of the time in which requests finished, lately.

    Gaps without any finished request do not count: an idle worker is not a slow one. Too few
    tokens say nothing, so they are no speed at all.
    """

    def __init__(
        self, window_seconds: float = 30.0, *, gap_seconds: float = 2.0, tokens_min: int = 200
    ) -> None:
        """Forget what is older than the window of busy time."""
        self._window = window_seconds
        self._gap = gap_seconds
        self._tokens_min = tokens_min
        self._marks: deque[tuple[float, int]] = deque()  # busy seconds since the last, tokens
        self._tokens, self._seconds = 0, 0.0  # sums of the marks, kept so that adding stays cheap
        self._last: float | None = None
        self._lock = threading.Lock()

    def add(self, tokens: int) -> None:
        """Count tokens that were generated just now."""
        now = time.monotonic()
        with self._lock:
            passed = self._gap if self._last is None else min(now - self._last, self._gap)
            self._last = now
            self._marks.append((passed, tokens))
            self._tokens += tokens
            self._seconds += passed
            while self._seconds > self._window:
                old_seconds, old_tokens = self._marks.popleft()
                self._seconds -= old_seconds
                self._tokens -= old_tokens

    def tokens_per_second(self) -> float | None:
        """Give the mean over the window; None until it is worth something."""
        with self._lock:
            enough = self._tokens >= self._tokens_min
            return self._tokens / self._seconds if enough else None
