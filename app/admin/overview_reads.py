"""What the overview shows: each piece is one read whose rows are bounded.

Throughput comes from samples of the reconciler, everything else from live rows and the Jobs' own
counters. Requests are read only as examples of errors: a few hundred rows of a few Jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from app.admin.job_reads import JobRow, live_jobs
from app.admin.worker_reads import WorkerRow, list_workers
from app.jobs.workers import FailedProof, failed_proofs
from app.kit.db import Conn

ERROR_JOBS_MAX: Final = 20
ERRORS_OF_JOB_MAX: Final = 500
ERROR_COMPLETIONS_MAX: Final = 1000
CODES_MAX: Final = 8
LIVE_JOBS_MAX: Final = 8
STOPPED_MAX: Final = 3
LATELY_SECONDS: Final = 60.0
CHART_MINUTES: Final = 60


@dataclass(frozen=True, slots=True)
class Throughput:
    """What ended in some stretch of time, and how long it was."""

    seconds: float
    requests: int
    errored: int
    tokens: int

    @property
    def requests_per_second(self) -> float:
        """Requests that ended, a second."""
        return self.requests / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens that were charged, a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Minute:
    """One point of the charts: unix seconds, requests and tokens a second (None: not sampled)."""

    at: int
    requests: float | None
    tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQueue:
    """The work that waits for one model, and who does it.

    `oldest`: since when a Job waits of which nothing runs, for `age_seconds` by now.
    """

    model: str
    workers: int
    jobs: int
    pending: int
    running: int
    oldest: datetime | None
    age_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCode:
    """How often a code was seen lately, and one example."""

    code: str
    count: int
    job_id: UUID | None
    request_index: int | None
    message: str | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of all accounts together, and what was charged in the last hour."""

    balance: int
    held: int
    charged_hour: int
    stopped: int


@dataclass(frozen=True, slots=True)
class StoppedAccount:
    """An account that gets no new Holds, and why."""

    id: UUID
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything that the overview shows, of one moment."""

    lately: Throughput
    minutes: Sequence[Minute]
    queues: Sequence[ModelQueue]
    errors: Sequence[ErrorCode]
    tokens: Tokens
    stopped: Sequence[StoppedAccount]
    workers: Sequence[WorkerRow]
    unproven: Sequence[FailedProof]
    jobs: Sequence[JobRow]

    @property
    def pending(self) -> int:
        """Requests that wait, of all models."""
        return sum(queue.pending for queue in self.queues)

    @property
    def running(self) -> int:
        """Requests in leased shards, of all models."""
        return sum(queue.running for queue in self.queues)

    @property
    def was_sampled(self) -> bool:
        """Whether the charts have any point to show."""
        return any(minute.tokens is not None for minute in self.minutes)

    @property
    def oldest(self) -> ModelQueue | None:
        """The queue in which a Job waits longest."""
        waiting = [queue for queue in self.queues if queue.age_seconds is not None]
        return max(waiting, key=lambda queue: queue.age_seconds or 0.0, default=None)

    @property
    def workers_up(self) -> int:
        """Workers that take work now."""
        return sum(worker.condition == "ready" for worker in self.workers)

    @property
    def engine_speed(self) -> float | None:
        """Tokens a second that busy engines report."""
        speeds = [w.tokens_per_second for w in self.workers if w.is_busy and w.tokens_per_second]
        return sum(speeds) if speeds else None


def read_overview(conn: Conn) -> Overview:
    """Read everything that the overview shows."""
    return Overview(
        lately=_lately(conn),
        minutes=_minutes(conn),
        queues=model_queues(conn),
        errors=_errors(conn),
        tokens=_tokens(conn),
        stopped=_stopped(conn),
        workers=list_workers(conn, gone_minutes=0),
        unproven=failed_proofs(conn),
        jobs=live_jobs(conn, LIVE_JOBS_MAX),
    )


def model_queues(conn: Conn) -> list[ModelQueue]:
    """Read the queue of every model that has work or a worker, the oldest work first."""
    rows = conn.execute(
        """
        WITH work AS (
            SELECT model, count(*)::integer AS jobs, sum(waiting)::bigint AS pending,
                sum(n_running)::bigint AS running,
                min(CASE WHEN waiting = 0 OR n_running > 0 THEN NULL
                    WHEN started_at IS NULL THEN created_at
                    -- What ran last ended just before the first shard that waits.
                    ELSE greatest(started_at, (
                        SELECT ended.finished_at FROM shards AS ended
                        WHERE ended.job_id = live.id AND ended.first_index < (
                            SELECT first_index FROM shards AS ahead
                            WHERE ahead.job_id = live.id AND ahead.state = 'pending'
                            ORDER BY first_index LIMIT 1)
                        ORDER BY ended.first_index DESC LIMIT 1)) END) AS oldest
            FROM (
                SELECT id, model, created_at, started_at, n_running, n_total - n_running
                    - n_succeeded - n_errored - n_cancelled - n_expired AS waiting
                FROM jobs WHERE state IN ('queued', 'in_progress')
            ) AS live GROUP BY model
        ), crew AS (
            SELECT model, (count(*) FILTER (WHERE state = 'ready'))::integer AS workers
            FROM workers WHERE heartbeat_at > now() - interval '60 seconds' AND state <> 'gone'
            GROUP BY model
        )
        SELECT model, coalesce(workers, 0) AS workers, coalesce(jobs, 0) AS jobs,
            coalesce(pending, 0) AS pending, coalesce(running, 0) AS running, oldest,
            extract(epoch FROM clock_timestamp() - oldest)::float8 AS age_seconds
        FROM work FULL JOIN crew USING (model)
        ORDER BY oldest NULLS LAST, model LIMIT 50
        """
    )
    return [ModelQueue(**row) for row in rows]


def _lately(conn: Conn) -> Throughput:
    row = conn.execute(
        """
        SELECT greatest(coalesce(sum(seconds), 0), 55)::float8 AS seconds,
            coalesce(sum(requests), 0)::bigint AS requests,
            coalesce(sum(errored), 0)::bigint AS errored,
            coalesce(sum(tokens), 0)::bigint AS tokens
        FROM samples WHERE at > now() - make_interval(secs => %s)
        """,
        [LATELY_SECONDS],
    ).fetchone()
    assert row is not None
    return Throughput(**row)


def _minutes(conn: Conn) -> list[Minute]:
    """Read the last hour, minute by minute; the minute that has not ended is left out."""
    rows = conn.execute(
        """
        SELECT extract(epoch FROM minute)::bigint AS at,
            (sum(requests) / greatest(sum(seconds), 55))::float8 AS requests,
            (sum(tokens) / greatest(sum(seconds), 55))::float8 AS tokens
        FROM generate_series(date_trunc('minute', now()) - make_interval(mins => %s),
            date_trunc('minute', now()) - interval '1 minute', interval '1 minute') AS minute
        LEFT JOIN samples ON samples.at >= minute AND samples.at < minute + interval '1 minute'
        GROUP BY minute ORDER BY minute
        """,
        [CHART_MINUTES],
    )
    return [Minute(**row) for row in rows]


def _tokens(conn: Conn) -> Tokens:
    row = conn.execute(
        """
        SELECT coalesce(sum(balance), 0)::bigint AS balance, coalesce(sum(held), 0)::bigint AS held,
            (SELECT coalesce(sum(tokens), 0)::bigint FROM samples
                WHERE at > now() - interval '1 hour') AS charged_hour,
            (count(*) FILTER (WHERE holds_stopped_at IS NOT NULL))::integer AS stopped
        FROM accounts
        """
    ).fetchone()
    assert row is not None
    return Tokens(**row)


def _stopped(conn: Conn) -> list[StoppedAccount]:
    rows = conn.execute(
        """
        SELECT id, name, coalesce(holds_stopped_reason, '') AS reason FROM accounts
        WHERE holds_stopped_at IS NOT NULL ORDER BY holds_stopped_at DESC, id LIMIT %s
        """,
        [STOPPED_MAX],
    )
    return [StoppedAccount(**row) for row in rows]


def _errors(conn: Conn) -> list[ErrorCode]:
    """Count codes of the newest Jobs that have errors, and of the last day's Completions."""
    rows = conn.execute(
        """
        WITH lately AS (
            SELECT id FROM jobs WHERE n_errored > 0
            ORDER BY created_at DESC, id DESC LIMIT %(jobs)s
        ), errored AS (
            SELECT lately.id AS job_id, request_index, error_code, error_message
            FROM lately CROSS JOIN LATERAL (
                SELECT request_index, error_code, error_message FROM requests
                WHERE requests.job_id = lately.id AND error_code IS NOT NULL
                ORDER BY request_index LIMIT %(errors)s
            ) AS few
            UNION ALL
            SELECT NULL, NULL, error_code, error_message FROM (
                SELECT error_code, error_message FROM completions
                WHERE finished_at > now() - interval '1 day'
                ORDER BY finished_at DESC LIMIT %(completions)s
            ) AS answers WHERE error_code IS NOT NULL
        )
        SELECT error_code AS code, count(*) AS count,
            (array_agg(job_id ORDER BY job_id DESC NULLS LAST, request_index))[1] AS job_id,
            (array_agg(request_index ORDER BY job_id DESC NULLS LAST, request_index))[1]
                AS request_index,
            (array_agg(error_message ORDER BY job_id DESC NULLS LAST, request_index))[1] AS message
        FROM errored GROUP BY error_code ORDER BY count(*) DESC, error_code LIMIT %(codes)s
        """,
        {
            "jobs": ERROR_JOBS_MAX,
            "errors": ERRORS_OF_JOB_MAX,
            "completions": ERROR_COMPLETIONS_MAX,
            "codes": CODES_MAX,
        },
    )
    return [ErrorCode(**row) for row in rows]
