"""What is known of workers: their rows, and the shards that they have in hand."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from app.jobs.workers import SILENT_SECONDS_MAX
from app.kit.db import Conn

SHOWN_MAX: Final = 200
SILENT_SECONDS: Final = 15.0  # seven missed heartbeats


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A worker as the dashboard shows it; speed in tokens a second."""

    id: UUID
    model: str
    model_revision: str
    dtype: str
    engine: str | None
    mode: str | None
    host: str
    pid: int
    state: str
    drain_requested: bool
    started_at: datetime
    ready_at: datetime | None
    heartbeat_at: datetime
    last_canary_at: datetime | None
    canary: str | None
    rss_bytes: int | None
    requests_running: int | None
    tokens_per_second: float | None
    silent_seconds: float
    shards: int

    @property
    def condition(self) -> str:
        """Its state, or `silent` when it should be heard of and is not."""
        if self.state != "gone" and self.silent_seconds > SILENT_SECONDS:
            return "silent"
        return self.state

    @property
    def is_busy(self) -> bool:
        """Whether its engine has requests now."""
        return self.condition in ("ready", "draining") and bool(self.requests_running)

    @property
    def may_drain(self) -> bool:
        """Whether asking it to drain changes anything."""
        return self.state in ("starting", "ready") and not self.drain_requested


def list_workers(conn: Conn, *, gone_minutes: int) -> list[WorkerRow]:
    """List workers that are there, then those that left in the last `gone_minutes`."""
    rows = conn.execute(
        """
        SELECT workers.id, model, model_revision, dtype, engine, mode, host, pid, workers.state,
            drain_requested, started_at, ready_at, heartbeat_at, last_canary_at, canary, rss_bytes,
            requests_running, tokens_per_second,
            extract(epoch FROM clock_timestamp() - heartbeat_at)::float8 AS silent_seconds,
            coalesce(held.shards, 0) AS shards
        FROM workers LEFT JOIN (
            SELECT worker_id, count(*)::integer AS shards FROM shards
            WHERE state = 'leased' GROUP BY worker_id
        ) AS held ON held.worker_id = workers.id
        WHERE heartbeat_at > now() - make_interval(mins => %(gone)s, secs => %(silent)s)
            AND (workers.state <> 'gone'
                OR heartbeat_at > now() - make_interval(mins => %(gone)s))
        ORDER BY workers.state = 'gone', model, started_at, workers.id LIMIT %(limit)s
        """,
        {"gone": gone_minutes, "silent": SILENT_SECONDS_MAX + 60, "limit": SHOWN_MAX},
    )
    return [WorkerRow(**row) for row in rows]
