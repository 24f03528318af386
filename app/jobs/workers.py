"""Worker rows: who serves which model, when it was last heard of, whether it proved to steer.

A worker registers, becomes ready when its engine has proved itself, and sends heartbeats. Rows
decide nothing about leases: those live in shards and end by themselves.
"""

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from app.jobs.records import WorkerControl, WorkerIdentity, WorkerStats
from app.kit.db import Conn

__all__ = [
    "SILENT_SECONDS_MAX",
    "FailedProof",
    "WorkerControl",
    "WorkerIdentity",
    "WorkerStats",
    "failed_proofs",
    "mark_dead_workers",
    "register_worker",
    "worker_gone",
    "worker_heartbeat",
    "worker_proved",
    "worker_ready",
]

# Long enough that a silent worker is seen to be silent, by Prometheus too, before it counts as
# gone. Nothing waits for it: leases end by themselves, and nobody counts on a silent worker.
SILENT_SECONDS_MAX: Final = 300.0
PROOF_HOURS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedProof:
    """The last worker of a model that could not show that it steers, and how many there were."""

    model: str
    host: str
    outcome: str
    workers: int


def register_worker(conn: Conn, worker: WorkerIdentity) -> None:
    """Add a worker that starts; repeatable."""
    conn.execute(
        """
        INSERT INTO workers (id, model, model_revision, dtype, engine, host, pid, state)
        VALUES (%s, %s, %s, %s, %s, %s, %s, 'starting')
        ON CONFLICT (id) DO NOTHING
        """,
        [
            *(worker.worker_id, worker.model, worker.model_revision, worker.dtype),
            *(worker.engine, worker.host, worker.pid),
        ],
    )


def worker_ready(conn: Conn, worker: WorkerIdentity, *, mode: str) -> None:
    """Let a worker lease: its engine runs in `mode` and has proved that it steers."""
    conn.execute(
        """
        UPDATE workers SET state = CASE WHEN drain_requested THEN 'draining' ELSE 'ready' END,
            engine = %s, mode = %s, ready_at = coalesce(ready_at, now()), heartbeat_at = now()
        WHERE id = %s
        """,
        [worker.engine, mode, worker.worker_id],
    )


def worker_heartbeat(conn: Conn, worker_id: UUID, stats: WorkerStats) -> WorkerControl:
    """Note that a worker lives; tell it whether to drain.

    A worker that was taken for dead comes back to life. One whose row is missing must drain. What
    tells a worker to drain says so in its state at once: from then on it cannot be told otherwise.
    """
    row = conn.execute(
        """
        UPDATE workers SET heartbeat_at = now(), rss_bytes = %s, requests_running = %s,
            tokens_per_second = %s,
            state = CASE WHEN drain_requested THEN 'draining'
                WHEN ready_at IS NOT NULL THEN 'ready' ELSE 'starting' END
        WHERE id = %s
        RETURNING drain_requested
        """,
        [stats.rss_bytes, stats.requests_running, stats.tokens_per_second, worker_id],
    ).fetchone()
    return WorkerControl(drain=row is None or row["drain_requested"])


def worker_proved(conn: Conn, worker_id: UUID, outcome: str) -> None:
    """Keep how the last check of steering ended."""
    conn.execute(
        "UPDATE workers SET last_canary_at = now(), canary = %s WHERE id = %s",
        [outcome, worker_id],
    )


def failed_proofs(conn: Conn) -> list[FailedProof]:
    """List models of which a worker could not show that it steers, within PROOF_HOURS.

    A worker that failed ends at once, so its state does not matter. It is answered by one of its
    model that started later and passed.
    """
    rows = conn.execute(
        """
        SELECT model, host, outcome, workers FROM (
            SELECT DISTINCT ON (model) model, host, canary AS outcome, heartbeat_at,
                count(*) OVER (PARTITION BY model) AS workers
            FROM workers
            WHERE canary <> 'passed' AND heartbeat_at > now() - make_interval(hours => %s)
                AND NOT EXISTS (
                    SELECT 1 FROM workers AS later
                    WHERE later.model = workers.model AND later.canary = 'passed'
                        AND later.started_at > workers.last_canary_at
                        AND later.heartbeat_at > workers.last_canary_at)
            ORDER BY model, heartbeat_at DESC
        ) AS failed ORDER BY heartbeat_at DESC
        """,
        [PROOF_HOURS],
    )
    return [FailedProof(**row) for row in rows]


def worker_gone(conn: Conn, worker_id: UUID) -> None:
    """Note that a worker has ended; its leases, if any are left, run out."""
    conn.execute("UPDATE workers SET state = 'gone' WHERE id = %s", [worker_id])


def mark_dead_workers(conn: Conn, *, silent_seconds: float) -> int:
    """Mark workers gone that were not heard of for so long; count them."""
    marked = conn.execute(
        """
        UPDATE workers SET state = 'gone'
        WHERE state <> 'gone' AND heartbeat_at < now() - make_interval(secs => %s)
        """,
        [silent_seconds],
    )
    return marked.rowcount
