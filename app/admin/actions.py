"""What operators do to Jobs and workers; each act and its row in the audit log are one transaction.

Several Jobs are cancelled one after the other, each in a transaction of its own (no two Jobs are
ever locked together). A dry run comes first: it counts, changes nothing, and names the moment up
to which Jobs are meant, so that what is submitted meanwhile is left alone.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from app.admin.access import Operator
from app.admin.audit import record
from app.errors import ConflictError, NotFoundError
from app.jobs.lifecycle import cancel_job as cancel
from app.jobs.lifecycle import lock_job
from app.jobs.states import JobState
from app.kit.db import Conn, Database
from app.kit.ids import public_id

JOBS_MAX: Final = 1000  # cancelled by one act; what is left is said
SECONDS_MAX: Final = 20.0  # a page must answer while a person waits
# Only these can still be cancelled.
CANCELLABLE: Final = (JobState.queued, JobState.in_progress, JobState.paused)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which Jobs are meant; None leaves a field open. `until` bounds when they were submitted."""

    account_id: UUID | None = None
    model: str | None = None
    state: JobState | None = None
    name: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def fields(self) -> dict[str, Any]:
        """Write the filter down for the audit log."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.account_id is not None:
            given["account_id"] = public_id("acct", self.account_id)
        for name in ("since", "until"):
            if name in given:
                given[name] = given[name].isoformat()
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """What a bulk cancel does: `jobs` were, or on a dry run would be, cancelled.

    `more` says that others match, beyond the limit. `filter` names the moment that was counted at;
    pass it on to carry out exactly what the dry run showed.
    """

    jobs: int
    requests: int
    more: bool
    filter: JobFilter


def cancel_jobs(
    database: Database,
    operator: Operator,
    chosen: JobFilter,
    *,
    dry_run: bool,
    jobs_max: int = JOBS_MAX,
) -> Cancelled:
    """Cancel the Jobs that `chosen` names, the oldest first; on a dry run count them only."""
    with database.transaction() as conn:
        if chosen.until is None:
            chosen = replace(chosen, until=_now(conn))
        found = _matching(conn, chosen, jobs_max + 1)
    more, found = len(found) > jobs_max, found[:jobs_max]
    if dry_run:
        waiting = sum(requests for _, requests in found)
        return Cancelled(jobs=len(found), requests=waiting, more=more, filter=chosen)
    stop_at = time.monotonic() + SECONDS_MAX
    jobs = requests = 0
    for job_id, _ in found:
        if time.monotonic() > stop_at:
            more = True
            break
        stopped = database.run(_cancelling(operator, job_id, bulk=True))
        if stopped is not None:
            jobs, requests = jobs + 1, requests + stopped
    done = Cancelled(jobs=jobs, requests=requests, more=more, filter=chosen)

    def note(conn: Conn) -> None:
        after = {"jobs": jobs, "requests": requests, "more": more}
        record(conn, operator, "jobs.cancel", "", before=chosen.fields(), after=after)

    database.run(note)
    return done


def cancel_job(conn: Conn, operator: Operator, job_id: UUID) -> bool:
    """Cancel one Job; False when it is over or being cancelled, and then it stays as it is.

    Raises NotFoundError.
    """
    return _cancel(conn, operator, job_id) is not None


def drain_worker(conn: Conn, operator: Operator, worker_id: UUID) -> bool:
    """Let a worker lease nothing more and end when it has finished; False when it does already.

    Raises NotFoundError.
    """
    return _set_drain(conn, operator, worker_id, drain=True)


def undrain_worker(conn: Conn, operator: Operator, worker_id: UUID) -> bool:
    """Take the wish back before the worker has heard of it; False when there was none.

    Raises NotFoundError, ConflictError.
    """
    return _set_drain(conn, operator, worker_id, drain=False)


def _cancelling(operator: Operator, job_id: UUID, *, bulk: bool) -> Callable[[Conn], int | None]:
    """Bind one Job for Database.run."""
    return lambda conn: _cancel(conn, operator, job_id, bulk=bulk)


def _cancel(conn: Conn, operator: Operator, job_id: UUID, *, bulk: bool = False) -> int | None:
    """Cancel a Job; count the requests that ended at once, None when there was nothing to do."""
    before = lock_job(conn, job_id)
    if before is None:
        msg = f"There is no Job {public_id('job', job_id)}."
        raise NotFoundError(msg)
    after = cancel(conn, job_id)
    assert after is not None, "the row is locked"
    if after.state == before.state:
        return None
    ended = after.n_cancelled - before.n_cancelled
    record(
        conn,
        operator,
        "job.cancel",
        public_id("job", job_id),
        before={"state": before.state, "tokens_held": before.tokens_held},
        after={
            "state": after.state,
            "tokens_held": after.tokens_held,
            "requests_cancelled": ended,
            **({"bulk": True} if bulk else {}),
        },
    )
    return ended


def _matching(conn: Conn, chosen: JobFilter, limit: int) -> list[tuple[UUID, int]]:
    """List Jobs that match and can be cancelled, with how many of their requests wait or run."""
    rows = conn.execute(
        """
        SELECT id, n_total - n_succeeded - n_errored - n_cancelled - n_expired AS requests
        FROM jobs
        WHERE state = ANY(%(states)s) AND finished_at IS NULL
            AND n_succeeded + n_errored + n_cancelled + n_expired < n_total
            AND (%(account_id)s::uuid IS NULL OR account_id = %(account_id)s)
            AND (%(model)s::text IS NULL OR model = %(model)s)
            AND (%(name)s::text IS NULL OR strpos(lower(name), lower(%(name)s)) > 0)
            AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s)
            AND created_at <= %(until)s
        ORDER BY id LIMIT %(limit)s
        """,
        {
            "states": [s for s in CANCELLABLE if chosen.state in (None, s)],
            "account_id": chosen.account_id,
            "model": chosen.model,
            "name": chosen.name,
            "since": chosen.since,
            "until": chosen.until,
            "limit": limit,
        },
    ).fetchall()
    return [(row["id"], row["requests"]) for row in rows]


def _set_drain(conn: Conn, operator: Operator, worker_id: UUID, *, drain: bool) -> bool:
    row = conn.execute(
        "SELECT state, drain_requested FROM workers WHERE id = %s FOR NO KEY UPDATE", [worker_id]
    ).fetchone()
    target = public_id("worker", worker_id)
    if row is None or row["state"] == "gone":
        msg = f"There is no running worker {target}."
        raise NotFoundError(msg)
    if row["drain_requested"] == drain:
        return False
    if not drain and row["state"] == "draining":
        # It heard of the wish in a heartbeat, and there is no way back from that.
        msg = "The worker has begun to drain and will end; start another one in its place."
        raise ConflictError(msg)
    conn.execute("UPDATE workers SET drain_requested = %s WHERE id = %s", [drain, worker_id])
    record(
        conn,
        operator,
        "worker.drain" if drain else "worker.undrain",
        target,
        before={"drain_requested": not drain},
        after={"drain_requested": drain},
    )
    return True


def _now(conn: Conn) -> datetime:
    row = conn.execute("SELECT clock_timestamp() AS now").fetchone()
    assert row is not None
    now: datetime = row["now"]
    return now
