"""What the reconciler does, one duty a function; each returns how much it did.

Every step may be run twice at once, at any time, and is cut off by a limit: what is left waits
for the next round. It repairs liveness (leases, wake-ups, endings), never money: an account whose
ledger does not add up gets no new Holds, and somebody is told.
"""

import logging
from collections.abc import Callable
from typing import Protocol
from uuid import UUID

from app.completions.records import end_overdue
from app.jobs import claims, workers
from app.jobs.audit_runs import note_run, run_rules, snapshot, started_at
from app.jobs.lifecycle import due_jobs, expire_job, finishable_jobs
from app.kit.db import Database
from app.ledger.holds import stop_holds
from app.ledger.invariants import Violation

log = logging.getLogger(__name__)

ROUNDS_MAX = 100  # transactions of one step in one round of the reconciler
SHARDS_MAX = 64  # expired leases ended in one transaction
JOBS_MAX = 200
IDEMPOTENCY_KEY_DAYS = 7
IDEMPOTENCY_KEYS_MAX = 5000
# Longer than any statement may take (statement_timeout in kit.db). Postgres does not apply its
# own limits while it reads the rest of a statement or of a COPY from its client.
CLIENT_SILENT_SECONDS = 35.0
AUDIT_STATEMENT_SECONDS = 600  # counts every row there is; nothing waits for it
# Rules whose violation means that a balance is wrong; their subject is the account.
BALANCE_RULES = frozenset({"L1", "L2", "L3"})


class SupportsWake(Protocol):
    """Sends wake-ups, as app.queue.Waker does."""

    def wake(self, model: str) -> bool:
        """Tell workers of `model` that there may be work."""


def end_silent_sessions(database: Database) -> int:
    """End sessions of Tiller whose client froze in the middle of a statement; count them.

    Such a session keeps its locks for ever: it is neither idle in its transaction nor does its
    statement run, so no limit of Postgres ends it.
    """
    with database.transaction() as conn:
        ended = conn.execute(
            """
            SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND usename = current_user
                AND application_name = 'tiller' AND state = 'active'
                AND wait_event_type = 'Client' AND pid <> pg_backend_pid()
                AND greatest(state_change, query_start)
                    < clock_timestamp() - make_interval(secs => %s)
            """,
            [CLIENT_SILENT_SECONDS],
        )
        return ended.rowcount


def expire_leases(database: Database) -> int:
    """Give shards back whose lease ran out; count the leases."""
    total = 0
    for _ in range(ROUNDS_MAX):
        with database.transaction() as conn:
            ended = claims.expire_leases(conn, SHARDS_MAX)
        if not ended:
            break
        total += ended
    return total


def expire_jobs(database: Database) -> int:
    """Begin the expiry of Jobs whose time is over; count them."""
    with database.transaction() as conn:
        jobs = due_jobs(conn, JOBS_MAX)
    expired = 0
    for job_id in jobs:
        with database.transaction() as conn:
            expired += expire_job(conn, job_id)
    return expired


def end_completions(database: Database) -> int:
    """End Completions whose time is over or whose worker is lost; count them."""
    total = 0
    for _ in range(ROUNDS_MAX):
        with database.transaction() as conn:
            ended = end_overdue(conn)
        if not ended:
            break
        total += ended
    return total


def finish_jobs(database: Database, finalize: Callable[[UUID], object]) -> int:
    """Finish Jobs whose requests are all terminal; count those that were tried.

    One Job that cannot be finished does not keep the others from it.
    """
    with database.transaction() as conn:
        jobs = finishable_jobs(conn, JOBS_MAX)
    for job_id in jobs:
        try:
            finalize(job_id)
        except Exception:
            log.exception("a Job could not be finished", extra={"job_id": job_id.hex})
    return len(jobs)


def wake_models(database: Database, waker: SupportsWake) -> int:
    """Wake the workers of every model for which shards wait; count the models."""
    with database.transaction() as conn:
        models = claims.claimable_models(conn)
    return sum(waker.wake(model) for model in models)


def mark_dead_workers(database: Database) -> int:
    """Mark workers gone that are silent; count them."""
    with database.transaction() as conn:
        return workers.mark_dead_workers(conn, silent_seconds=workers.SILENT_SECONDS_MAX)


def forget_old_idempotency_keys(database: Database) -> int:
    """Delete idempotency keys that are older than clients may rely on; count them."""
    with database.transaction() as conn:
        forgotten = conn.execute(
            """
            DELETE FROM idempotency_keys WHERE (account_id, key) IN (
                SELECT account_id, key FROM idempotency_keys
                WHERE created_at < now() - make_interval(days => %s)
                ORDER BY created_at LIMIT %s FOR UPDATE SKIP LOCKED)
            """,
            [IDEMPOTENCY_KEY_DAYS, IDEMPOTENCY_KEYS_MAX],
        )
        return forgotten.rowcount


def audit(database: Database) -> list[Violation]:
    """Check every invariant on one snapshot; log what is broken and stop Holds where money is.

    Nothing is repaired: a person has to understand it first.
    """
    with snapshot(database, statement_seconds=AUDIT_STATEMENT_SECONDS) as conn:
        began_at, outcomes = started_at(conn), run_rules(conn)
    for outcome in outcomes:
        if outcome.outcome == "unfinished":
            log.warning("invariant not checked in time", extra={"invariant": outcome.name})
    violations = [item for outcome in outcomes for item in outcome.violations]
    for violation in violations:
        log.error(
            "invariant broken",
            extra={
                "invariant": violation.invariant,
                "sentence": violation.sentence,
                "subject": violation.subject,
                "detail": violation.detail,
            },
        )
    for violation in violations:
        if violation.invariant in BALANCE_RULES:
            with database.transaction() as conn:
                reason = f"{violation.invariant}: {violation.detail}"
                stop_holds(conn, UUID(violation.subject), reason)
    with database.transaction() as conn:
        note_run(conn, began_at, outcomes, run_by="the reconciler")
    return violations
