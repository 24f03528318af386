"""The read side of a Job: its row and what surrounds it become the Job object of the API.

Everything comes from the Job's own counters and a few rows of workers, so a read costs the same
for three requests and for three million. Only `error_summary` looks at requests, and it stops
after a bounded number of rows.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import orjson

from app.catalog.queue_state import FRESH_SECONDS
from app.jobs.records import Job, job_from_row
from app.jobs.schemas import PRIORITIES
from app.jobs.states import JOB_TERMINAL, JobState
from app.kit.db import Conn
from app.kit.ids import public_id
from app.kit.pages import PageQuery

ERRORED_ROWS_MAX = 10_000  # rows that error_summary counts at most
ERROR_CODES_MAX = 10
AHEAD_MAX = 1000  # queue_position stops counting here
_PRIORITY_NAMES = {number: name for name, number in PRIORITIES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A Job at one moment, with what its own row does not say."""

    job: Job
    now: datetime
    is_served: bool
    is_starting: bool
    first_ready: tuple[datetime, datetime] | None  # (started_at, ready_at) of its first worker
    jobs_ahead: int | None
    errors: Sequence[dict[str, Any]]

    @property
    def etag(self) -> str:
        """Name the state of this Job; it changes with everything but the passing of time."""
        job = self.job
        facts = (
            job.version, job.sequence, job.state, job.n_running, job.n_succeeded, job.n_errored,
            job.n_cancelled, job.n_expired, job.tokens_held, job.tokens_charged,
            job.tokens_released, job.engine, status_reason(self),
        )  # fmt: skip
        return f'W/"{hashlib.sha256(orjson.dumps(facts)).hexdigest()[:32]}"'


def view_job(conn: Conn, account_id: UUID, job_id: UUID) -> JobView | None:
    """Look at a Job of the account as it is now; None when there is none."""
    row = conn.execute(
        """
        SELECT jobs.*, clock_timestamp() AS now, served.*, first.ready_at AS first_ready_at,
            first.started_at AS first_started_at
        FROM jobs
        CROSS JOIN LATERAL (
            SELECT coalesce(bool_or(state = 'ready'), false) AS is_served,
                coalesce(bool_or(state = 'starting'), false) AS is_starting,
                coalesce(bool_or(ready_at <= jobs.created_at), false) AS was_served
            FROM workers
            WHERE workers.model = jobs.model AND model_revision = jobs.model_revision
                AND workers.dtype = jobs.dtype
                AND heartbeat_at > now() - make_interval(secs => %(fresh)s)
        ) AS served
        LEFT JOIN LATERAL (
            SELECT workers.started_at, ready_at FROM workers
            WHERE workers.model = jobs.model AND ready_at > jobs.created_at
                AND ready_at <= coalesce(jobs.started_at, now()) AND NOT served.was_served
            ORDER BY ready_at LIMIT 1
        ) AS first ON true
        WHERE jobs.id = %(id)s AND jobs.account_id = %(account_id)s
        """,
        {"id": job_id, "account_id": account_id, "fresh": FRESH_SECONDS},
    ).fetchone()
    if row is None:
        return None
    job = job_from_row(row)
    first = None
    if row["first_ready_at"] is not None:
        first = (row["first_started_at"], row["first_ready_at"])
    return JobView(
        job=job,
        now=row["now"],
        is_served=row["is_served"],
        is_starting=row["is_starting"],
        first_ready=first,
        jobs_ahead=_jobs_ahead(conn, job) if job.state is JobState.queued else None,
        errors=_error_summary(conn, job.id) if job.n_errored else (),
    )


def list_jobs(
    conn: Conn, account_id: UUID, page: PageQuery, *, state: str | None, model: str | None
) -> list[UUID] | None:
    """List ids of Jobs, one more than the page holds; None when `after` is not the account's."""
    after = None
    if page.after is not None:
        after = conn.execute(
            "SELECT created_at, id FROM jobs WHERE account_id = %s AND id = %s",
            (account_id, page.after),
        ).fetchone()
        if after is None:
            return None
    values = {
        "account_id": account_id,
        "state": state,
        "model": model,
        "created_at": after and after["created_at"],
        "id": after and after["id"],
        "limit": page.limit + 1,
    }
    if page.order == "desc":
        rows = conn.execute(
            """
            SELECT id FROM jobs
            WHERE account_id = %(account_id)s
                AND (%(state)s::text IS NULL OR state = %(state)s)
                AND (%(model)s::text IS NULL OR model = %(model)s)
                AND (%(id)s::uuid IS NULL OR (created_at, id) < (%(created_at)s, %(id)s))
            ORDER BY created_at DESC, id DESC LIMIT %(limit)s
            """,
            values,
        )
    else:
        rows = conn.execute(
            """
            SELECT id FROM jobs
            WHERE account_id = %(account_id)s
                AND (%(state)s::text IS NULL OR state = %(state)s)
                AND (%(model)s::text IS NULL OR model = %(model)s)
                AND (%(id)s::uuid IS NULL OR (created_at, id) > (%(created_at)s, %(id)s))
            ORDER BY created_at, id LIMIT %(limit)s
            """,
            values,
        )
    return [row["id"] for row in rows]


def job_object(view: JobView) -> dict[str, Any]:
    """Write the Job as the API shows it; times are unix seconds, accounting is in seconds."""
    job = view.job
    job_id = public_id("job", job.id)
    path = f"/v1/jobs/{job_id}"
    return {
        "id": job_id,
        "object": "job",
        "status": job.state,
        "outcome": _outcome(job),
        "status_reason": status_reason(view),
        "name": job.name,
        "metadata": job.metadata,
        "priority": _PRIORITY_NAMES[job.priority],
        "model": job.model,
        "model_revision": job.model_revision,
        "dtype": job.dtype,
        "engine": job.engine,
        "endpoint": "/v1/completions",
        "reproducible": job.reproducible,
        "version": job.version,
        "sequence": job.sequence,
        "created_at": _seconds(job.created_at),
        "started_at": _seconds(job.started_at),
        "cancel_requested_at": _seconds(job.cancel_requested_at),
        "finished_at": _seconds(job.finished_at),
        "expires_at": _seconds(job.expires_at),
        "request_counts": request_counts(job),
        "progress": _progress(view),
        "usage": {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.completion_tokens,
            "total_tokens": job.prompt_tokens + job.completion_tokens,
            "held": job.tokens_held,
            "charged": job.tokens_charged,
            "released": job.tokens_released,
        },
        "accounting": accounting(view),
        "error_summary": list(view.errors),
        "links": {
            "self": path,
            "requests": f"{path}/requests",
            "manifest": f"{path}/manifest",
            "cancel": f"{path}/cancel",
        },
    }


def request_counts(job: Job) -> dict[str, int]:
    """Count requests by state; `completed` and `failed` are what other APIs call two of them."""
    return {
        "total": job.n_total,
        "pending": job.n_pending,
        "running": job.n_running,
        "succeeded": job.n_succeeded,
        "errored": job.n_errored,
        "cancelled": job.n_cancelled,
        "expired": job.n_expired,
        "completed": job.n_succeeded,
        "failed": job.n_errored,
    }


def accounting(view: JobView) -> dict[str, float]:
    """Say where the wall clock went, in seconds; the parts add up to `total`."""
    job = view.job
    end = job.finished_at or view.now
    ran_until = job.ended_running_at or end
    waited_until = job.started_at or ran_until
    start = timedelta()
    if view.first_ready is not None:
        began, ready = view.first_ready
        start = max(min(ready, waited_until) - max(began, job.created_at), timedelta())
    parts = {
        "queued": waited_until - job.created_at - start,
        "engine_start": start,
        "running": ran_until - waited_until,
        "publishing": end - ran_until,
    }
    seconds = {name: round(max(part.total_seconds(), 0.0), 3) for name, part in parts.items()}
    total = round((end - job.created_at).total_seconds(), 3)
    seconds["rest"] = round(total - sum(seconds.values()), 3)
    return {**seconds, "total": total}


def status_reason(view: JobView) -> dict[str, str] | None:
    """Say why the Job stands where it does, when its status alone does not."""
    job = view.job
    if job.error_code is not None:
        return {"code": job.error_code, "message": job.error_message or ""}
    if job.state in JOB_TERMINAL:
        return None
    if job.expiry_began_at is not None:
        message = "The Job's time is over; requests that run now end soon."
        return {"code": "expiring", "message": message}
    if job.state is JobState.cancelling:
        message = "The Job is being cancelled; requests that run now are being stopped."
        return {"code": "cancel_requested", "message": message}
    if job.state in (JobState.queued, JobState.in_progress) and not view.is_served:
        if view.is_starting:
            message = f"A worker for {job.model} is starting."
            return {"code": "worker_starting", "message": message}
        message = f"No worker serves {job.model} now. The Job runs as soon as one does."
        return {"code": "no_worker", "message": message}
    return None


def _progress(view: JobView) -> dict[str, Any]:
    job = view.job
    percent = 100.0 * job.n_terminal / job.n_total if job.n_total else 100.0
    tokens_per_second = eta = None
    if job.started_at is not None:
        until = job.ended_running_at or view.now
        elapsed = max((until - job.started_at).total_seconds(), 0.001)
        tokens_per_second = round((job.prompt_tokens + job.completion_tokens) / elapsed, 1)
        if job.state is JobState.in_progress and job.n_terminal:
            eta = round((job.n_total - job.n_terminal) * elapsed / job.n_terminal)
    return {
        "percent": round(percent, 2),
        "tokens_per_second": tokens_per_second,
        "eta_seconds": eta,
        "queue_position": view.jobs_ahead,
    }


def _outcome(job: Job) -> str | None:
    if job.state not in JOB_TERMINAL:
        return None
    if job.n_succeeded == 0:
        return "none_succeeded"
    return "all_succeeded" if job.n_succeeded == job.n_total else "some_succeeded"


def _jobs_ahead(conn: Conn, job: Job) -> int:
    """Count Jobs of the model that a worker would look at before this one, up to a bound."""
    row = conn.execute(
        """
        SELECT count(*) AS ahead FROM (
            SELECT FROM jobs
            WHERE model = %s AND state IN ('queued', 'in_progress')
                AND (priority, created_at) < (%s, %s)
            LIMIT %s
        ) AS before
        """,
        (job.model, job.priority, job.created_at, AHEAD_MAX),
    ).fetchone()
    return row["ahead"] if row else 0


def _error_summary(conn: Conn, job_id: UUID) -> list[dict[str, Any]]:
    """Count the most frequent error codes, each with its first request as an example."""
    rows = conn.execute(
        """
        SELECT error_code AS code, count(*) AS count,
            min(request_index) AS example_index,
            (array_agg(error_message ORDER BY request_index))[1] AS example_message
        FROM (
            SELECT error_code, error_message, request_index FROM requests
            WHERE job_id = %s AND error_code IS NOT NULL
            ORDER BY request_index LIMIT %s
        ) AS errored
        GROUP BY error_code ORDER BY count(*) DESC, error_code LIMIT %s
        """,
        (job_id, ERRORED_ROWS_MAX, ERROR_CODES_MAX),
    )
    return list(rows)


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
