"""Worker rows: who serves which model, and when it was last heard of.

A worker registers, becomes ready when its engine has proved itself, and sends heartbeats. Rows
decide nothing about leases: those live in shards and end by themselves.
"""

from uuid import UUID

from app.jobs.records import WorkerControl, WorkerIdentity, WorkerStats
from app.kit.db import Conn

__all__ = [
    "WorkerControl",
    "WorkerIdentity",
    "WorkerStats",
    "mark_dead_workers",
    "register_worker",
    "worker_gone",
    "worker_heartbeat",
    "worker_proved",
    "worker_ready",
]


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
