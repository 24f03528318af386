"""How busy each model is: its live Jobs and the workers that were heard of lately."""

from dataclasses import dataclass

from app.kit.db import Conn

# Four missed heartbeats; a worker silent for longer is not counted on.
FRESH_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The queue of one model at one moment."""

    workers_ready: int = 0
    workers_starting: int = 0
    tokens_per_second: float | None = None
    jobs_live: int = 0
    requests_pending: int = 0
    requests_running: int = 0
    oldest_job_seconds: float | None = None


IDLE = QueueState()


def queue_states(conn: Conn) -> dict[str, QueueState]:
    """Read the queue of every model that has a live Job or a worker."""
    rows = conn.execute(
        """
        WITH work AS (
            SELECT model, count(*)::integer AS jobs_live,
                sum(n_total - n_running - n_succeeded - n_errored - n_cancelled - n_expired)::bigint
                    AS requests_pending,
                sum(n_running)::bigint AS requests_running,
                extract(epoch FROM now() - min(created_at))::float8 AS oldest_job_seconds
            FROM jobs WHERE state IN ('queued', 'in_progress') GROUP BY model
        ), crew AS (
            SELECT model, (count(*) FILTER (WHERE state = 'ready'))::integer AS workers_ready,
                (count(*) FILTER (WHERE state = 'starting'))::integer AS workers_starting,
                sum(tokens_per_second)::float8 AS tokens_per_second
            FROM workers
            WHERE heartbeat_at > now() - make_interval(secs => %s)
                AND state IN ('ready', 'starting', 'draining')
            GROUP BY model
        )
        SELECT model, coalesce(workers_ready, 0) AS workers_ready,
            coalesce(workers_starting, 0) AS workers_starting, tokens_per_second,
            coalesce(jobs_live, 0) AS jobs_live, coalesce(requests_pending, 0) AS requests_pending,
            coalesce(requests_running, 0) AS requests_running, oldest_job_seconds
        FROM work FULL JOIN crew USING (model)
        """,
        (FRESH_SECONDS,),
    )
    return {
        row["model"]: QueueState(**{key: row[key] for key in row if key != "model"}) for row in rows
    }
