"""A Job's moves that no worker makes: cancel, expire, finalize, complete.

    queued | in_progress | paused -> cancelling -> cancelled
    queued | in_progress | paused -> (expiry_began_at) -> finalizing -> expired
    queued | in_progress | paused -> finalizing -> completed | failed

Each function locks the Job's row first and moves it by one guarded UPDATE; the guard comes from
states.py. One transaction handles one Job, so that no two Jobs are ever locked together.
"""

from collections.abc import Sequence
from uuid import UUID

from app.jobs.ending import stop_pending
from app.jobs.records import Job, PublishedFile, job_from_row
from app.jobs.states import JobState, states_before
from app.kit.db import Conn

# These Jobs can still start requests; cancel and expiry stop that.
_LIVE = (JobState.queued, JobState.in_progress, JobState.paused)


class JobNotFinishedError(Exception):
    """The Job has requests that are not terminal, so it cannot be completed."""


def get_job(conn: Conn, job_id: UUID, *, account_id: UUID | None = None) -> Job | None:
    """Read a Job; None when there is none, or when it belongs to another account."""
    row = conn.execute(
        "SELECT * FROM jobs WHERE id = %s AND (account_id = %s OR %s::uuid IS NULL)",
        [job_id, account_id, account_id],
    ).fetchone()
    return None if row is None else job_from_row(row)


def lock_job(conn: Conn, job_id: UUID) -> Job | None:
    """Read a Job and keep others from changing it until the transaction ends."""
    row = conn.execute("SELECT * FROM jobs WHERE id = %s FOR NO KEY UPDATE", [job_id]).fetchone()
    return None if row is None else job_from_row(row)


def try_lock_job(conn: Conn, job_id: UUID) -> Job | None:
    """Lock a Job unless somebody else has it locked now (two reconcilers pass each other)."""
    row = conn.execute(
        "SELECT * FROM jobs WHERE id = %s FOR NO KEY UPDATE SKIP LOCKED", [job_id]
    ).fetchone()
    return None if row is None else job_from_row(row)


def cancel_job(conn: Conn, job_id: UUID, *, account_id: UUID | None = None) -> Job | None:
    """Cancel a Job: waiting requests end now, leased ones are left to their workers.

    Repeatable; a Job whose requests are all terminal stays as it is. None when there is no such
    Job, or when it belongs to another account.
    """
    job = lock_job(conn, job_id)
    if job is None or account_id not in (None, job.account_id):
        return None
    if job.state not in _LIVE or job.n_terminal == job.n_total:
        return job
    row = conn.execute(
        """
        UPDATE jobs SET state = 'cancelling', cancel_requested_at = now(), sequence = sequence + 1
        WHERE id = %s AND state = ANY(%s) RETURNING *
        """,
        [job_id, states_before(JobState.cancelling)],
    ).fetchone()
    assert row is not None, "the row is locked and was checked"
    stop_pending(conn, job_from_row(row))
    return get_job(conn, job_id)


def due_jobs(conn: Conn, limit: int) -> list[UUID]:
    """List Jobs whose time is over, the longest overdue first."""
    rows = conn.execute(
        """
        SELECT id FROM jobs
        WHERE state IN ('queued', 'in_progress', 'paused') AND expiry_began_at IS NULL
            AND expires_at < now()
        ORDER BY expires_at LIMIT %s
        """,
        [limit],
    ).fetchall()
    return [row["id"] for row in rows]


def expire_job(conn: Conn, job_id: UUID) -> bool:
    """Begin the expiry of an overdue Job: waiting requests end now as expired.

    The state stays until leased shards are finished; begin_finalizing moves it on. False when
    there was nothing to do.
    """
    job = try_lock_job(conn, job_id)
    if job is None or job.state not in _LIVE or job.n_terminal == job.n_total:
        return False
    row = conn.execute(
        """
        UPDATE jobs SET expiry_began_at = now(), sequence = sequence + 1
        WHERE id = %s AND expiry_began_at IS NULL AND expires_at < now() RETURNING *
        """,
        [job_id],
    ).fetchone()
    if row is None:
        return False
    stop_pending(conn, job_from_row(row))
    return True


def finishable_jobs(conn: Conn, limit: int) -> list[UUID]:
    """List Jobs that are not terminal although all their requests are."""
    rows = conn.execute(
        """
        SELECT id FROM jobs
        WHERE state NOT IN ('completed', 'failed', 'cancelled', 'expired')
            AND n_succeeded + n_errored + n_cancelled + n_expired = n_total
        ORDER BY id LIMIT %s
        """,
        [limit],
    ).fetchall()
    return [row["id"] for row in rows]


def begin_finalizing(conn: Conn, job_id: UUID) -> Job | None:
    """Stop the clock of a Job whose requests are all terminal; None when it is not one, or over.

    A cancelling Job stays cancelling, every other becomes finalizing. Repeatable.
    """
    job = lock_job(conn, job_id)
    if job is None or job.state.is_terminal or job.n_terminal < job.n_total:
        return None
    if job.ended_running_at is not None:
        return job
    row = conn.execute(
        """
        UPDATE jobs SET ended_running_at = now(), sequence = sequence + 1,
            state = CASE WHEN state = 'cancelling' THEN state ELSE 'finalizing' END
        WHERE id = %s AND (state = 'cancelling' OR state = ANY(%s)) RETURNING *
        """,
        [job_id, states_before(JobState.finalizing)],
    ).fetchone()
    return None if row is None else job_from_row(row)


def try_lock_finalizer(conn: Conn, job_id: UUID) -> bool:
    """Let one finalizer a Job write its files, until the transaction ends.

    Without it two processes could write manifest.json twice, with different bytes.
    """
    row = conn.execute(
        "SELECT pg_try_advisory_xact_lock(hashtextextended(%s::text, 0)) AS locked", [job_id]
    ).fetchone()
    return bool(row and row["locked"])


def next_state(job: Job) -> JobState:
    """Name the terminal state that a Job with only terminal requests ends in."""
    if job.cancel_requested_at is not None:
        return JobState.cancelled
    if job.n_expired:
        return JobState.expired
    if job.n_succeeded == 0 and job.n_errored:
        return JobState.failed
    return JobState.completed


def complete_job(conn: Conn, job_id: UUID, files: Sequence[PublishedFile]) -> Job:
    """Make a Job terminal and name its own files (stats, manifest, checksums).

    A Job that is terminal already stays as it is and `files` are ignored. Raises
    JobNotFinishedError unless begin_finalizing was done before.
    """
    job = lock_job(conn, job_id)
    if job is None or (job.ended_running_at is None and not job.state.is_terminal):
        msg = f"Job {job_id} still has requests to run"
        raise JobNotFinishedError(msg)
    if job.state.is_terminal:
        return job
    after = next_state(job)
    insert_files(conn, job_id, files, lease_token=None)
    failed = after is JobState.failed
    row = conn.execute(
        """
        UPDATE jobs SET state = %(after)s, finished_at = now(), sequence = sequence + 1,
            error_code = %(code)s, error_message = %(message)s
        WHERE id = %(id)s AND state = ANY(%(before)s) RETURNING *
        """,
        {
            "id": job_id,
            "after": after,
            "before": states_before(after),
            "code": "no_request_succeeded" if failed else None,
            "message": "Every request was errored; each names its reason." if failed else None,
        },
    ).fetchone()
    assert row is not None, f"a Job cannot go from {job.state} to {after}"
    return job_from_row(row)


def insert_files(
    conn: Conn, job_id: UUID, files: Sequence[PublishedFile], *, lease_token: int | None
) -> None:
    """Name files that lie complete in the object store, as part of `lease_token` or of the Job."""
    conn.execute(
        """
        INSERT INTO result_files (job_id, path, lease_token, kind, layer, capture, rows,
            bytes, sha256, first_index, end_index, site, before, reduce, width)
        SELECT %(job_id)s, file.path, %(lease_token)s, file.kind, file.layer, file.capture,
            file.rows, file.bytes, file.sha256, file.first_index, file.end_index,
            file.site, file.before, file.reduce, file.width
        FROM unnest(%(paths)s::text[], %(kinds)s::text[], %(layers)s::integer[],
                %(captures)s::text[], %(rows)s::bigint[], %(bytes)s::bigint[],
                %(sha256)s::text[], %(firsts)s::integer[], %(ends)s::integer[],
                %(sites)s::text[], %(befores)s::boolean[], %(reduces)s::text[],
                %(widths)s::integer[])
            AS file (path, kind, layer, capture, rows, bytes, sha256, first_index, end_index,
                site, before, reduce, width)
        """,
        {
            "job_id": job_id,
            "lease_token": lease_token,
            "paths": [file.path for file in files],
            "kinds": [file.kind for file in files],
            "layers": [file.layer for file in files],
            "captures": [file.capture for file in files],
            "rows": [file.rows for file in files],
            "bytes": [file.bytes for file in files],
            "sha256": [file.sha256 for file in files],
            "firsts": [file.first_index for file in files],
            "ends": [file.end_index for file in files],
            "sites": [file.site for file in files],
            "befores": [file.before for file in files],
            "reduces": [file.reduce for file in files],
            "widths": [file.width for file in files],
        },
    )
