"""Leases on shards: every arrow that a worker, or the end of a lease, takes.

                    claim_shards                    finish_shard
        pending ───────────────────> leased ─────────────────────────> done
           ^                           │ │  renew_leases
           └───────────────────────────┘ split_off, give_back_shard, leave_to_newer (by the worker)
                                         expire_leases (by the reconciler)
                                         report_engine_death

Every write of a worker names its lease token; when that is no longer the shard's token, nothing
changes and the answer says so. Locks are taken in one order: Job, shards, requests, ledger.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from uuid import UUID

from psycopg import Rollback

from app.jobs.ending import Span, end_with_results, stop_pending
from app.jobs.lifecycle import insert_files, lock_job, try_lock_job
from app.jobs.records import (
    Control,
    Job,
    LeasedShard,
    PublishedPart,
    RequestResult,
    WorkerIdentity,
    WorkRow,
)
from app.jobs.states import RequestState
from app.kit.db import Conn

CANDIDATES_MAX = 20  # Jobs looked at by one claim; all but the first are rarely needed
DEATHS_ALONE_MAX = 3  # a request is blamed after its third engine death with nothing beside it


def claim_shards(
    conn: Conn,
    worker: WorkerIdentity,
    *,
    lease_seconds: float,
    shards_max: int,
    without: Collection[UUID] = (),
) -> list[LeasedShard]:
    """Lease the next shards for a worker, all of one Job; an empty list when there is nothing.

    Accounts take turns: the one with the fewest leased shards first, then the one whose last
    turn is longest ago; within it the most urgent Job (priority 0 is interactive), then the
    oldest. Another account that waits limits the claim to one shard. Only a ready worker that is
    not draining gets any, and none of the Jobs `without`.
    """
    for candidate in _candidates(conn, worker, without):
        leased: list[LeasedShard] = []
        with conn.transaction():
            limit = 1 if candidate["others_wait"] else shards_max
            leased = _lease(conn, worker, candidate["id"], lease_seconds, limit)
            if not leased:
                raise Rollback  # gives the Job's lock back before the next Job is locked
        if leased:
            _note_turn(conn, worker, leased[0].account_id)
            return leased
    return []


def _candidates(
    conn: Conn, worker: WorkerIdentity, without: Collection[UUID]
) -> list[dict[str, object]]:
    """List claimable Jobs in the order of fairness, without locking any."""
    return conn.execute(
        """
        WITH claimable AS MATERIALIZED (
            SELECT jobs.id, jobs.account_id, jobs.priority, jobs.created_at
            FROM jobs
            WHERE jobs.model = %(model)s AND jobs.state IN ('queued', 'in_progress')
                AND jobs.model_revision = %(revision)s AND jobs.dtype = %(dtype)s
                AND (jobs.engine IS NULL OR jobs.engine = %(engine)s)
                AND jobs.id <> ALL(%(without)s)
                AND jobs.cancel_requested_at IS NULL AND jobs.expiry_began_at IS NULL
                AND jobs.expires_at > now()
                AND EXISTS (SELECT 1 FROM shards
                    WHERE shards.job_id = jobs.id AND shards.state = 'pending')
                AND EXISTS (SELECT 1 FROM workers WHERE workers.id = %(worker_id)s
                    AND workers.state = 'ready' AND NOT workers.drain_requested)
        ), in_use AS (
            SELECT jobs.account_id, count(*) AS shards
            FROM shards JOIN jobs ON jobs.id = shards.job_id
            WHERE shards.state = 'leased' AND jobs.model = %(model)s
            GROUP BY jobs.account_id
        )
        SELECT claimable.id,
            EXISTS (SELECT 1 FROM claimable AS other
                WHERE other.account_id <> claimable.account_id) AS others_wait
        FROM claimable
        LEFT JOIN in_use ON in_use.account_id = claimable.account_id
        LEFT JOIN turns ON turns.account_id = claimable.account_id
            AND turns.model = %(model)s
        ORDER BY coalesce(in_use.shards, 0), turns.served_at NULLS FIRST,
            claimable.account_id, claimable.priority, claimable.created_at, claimable.id
        LIMIT %(limit)s
        """,
        {
            "model": worker.model,
            "revision": worker.model_revision,
            "dtype": worker.dtype,
            "engine": worker.engine,
            "worker_id": worker.worker_id,
            "without": list(without),
            "limit": CANDIDATES_MAX,
        },
    ).fetchall()


def _lease(
    conn: Conn, worker: WorkerIdentity, job_id: object, lease_seconds: float, limit: int
) -> list[LeasedShard]:
    """Lock one Job, check again that it may run, and take its first pending shards."""
    job = conn.execute(
        """
        SELECT account_id, reproducible FROM jobs
        WHERE id = %s AND state IN ('queued', 'in_progress')
            AND cancel_requested_at IS NULL AND expiry_began_at IS NULL
            AND (engine IS NULL OR engine = %s)
        FOR NO KEY UPDATE
        """,
        [job_id, worker.engine],
    ).fetchone()
    if job is None or worker.engine is None:
        return []
    # MATERIALIZED: the planner must not run the locking query more than once.
    rows = conn.execute(
        """
        WITH picked AS MATERIALIZED (
            SELECT id FROM shards WHERE job_id = %(job_id)s AND state = 'pending'
            ORDER BY first_index LIMIT %(limit)s FOR UPDATE SKIP LOCKED
        )
        UPDATE shards SET state = 'leased', lease_token = nextval('lease_tokens'),
            lease_expires_at = clock_timestamp() + make_interval(secs => %(seconds)s),
            worker_id = %(worker_id)s, leased_at = clock_timestamp(), attempt = attempt + 1
        FROM picked WHERE shards.id = picked.id
        RETURNING shards.id, shards.job_id, first_index, end_index, lease_token, attempt,
            engine_deaths,
            (SELECT count(*) FROM requests WHERE requests.job_id = shards.job_id
                AND requests.request_index >= first_index AND requests.request_index < end_index
                AND requests.state = 'pending') AS requests_pending
        """,
        {
            "job_id": job_id,
            "limit": limit,
            "seconds": lease_seconds,
            "worker_id": worker.worker_id,
        },
    ).fetchall()
    running = sum(row.pop("requests_pending") for row in rows)
    if rows:
        conn.execute(
            """
            UPDATE jobs SET state = 'in_progress', started_at = coalesce(started_at, now()),
                engine = %s, n_running = n_running + %s,
                sequence = sequence + CASE state WHEN 'queued' THEN 1 ELSE 0 END
            WHERE id = %s
            """,
            [worker.engine, running, job_id],
        )
    return [LeasedShard(**row, **job) for row in sorted(rows, key=lambda row: row["first_index"])]


def _note_turn(conn: Conn, worker: WorkerIdentity, account_id: UUID) -> None:
    conn.execute(
        """
        INSERT INTO turns (account_id, model, served_at) VALUES (%s, %s, clock_timestamp())
        ON CONFLICT (account_id, model) DO UPDATE SET served_at = excluded.served_at
        """,
        [account_id, worker.model],
    )
    conn.execute(
        "UPDATE workers SET last_claim_at = clock_timestamp() WHERE id = %s", [worker.worker_id]
    )


def has_claimable_work(conn: Conn, model: str) -> bool:
    """Tell whether any shard of this model waits for a worker."""
    return model in claimable_models(conn)


def claimable_models(conn: Conn) -> list[str]:
    """List the models for which shards wait."""
    rows = conn.execute(
        """
        SELECT DISTINCT model FROM jobs
        WHERE state IN ('queued', 'in_progress') AND expires_at > now()
            AND cancel_requested_at IS NULL AND expiry_began_at IS NULL
            AND EXISTS (SELECT 1 FROM shards
                WHERE shards.job_id = jobs.id AND shards.state = 'pending')
        ORDER BY model
        """
    ).fetchall()
    return [row["model"] for row in rows]


def load_work(conn: Conn, shard: LeasedShard) -> list[WorkRow]:
    """Read the pending requests of a shard in order."""
    rows = conn.execute(
        """
        SELECT request_index, custom_id, spec FROM requests
        WHERE job_id = %s AND request_index >= %s AND request_index < %s AND state = 'pending'
        ORDER BY request_index
        """,
        [shard.job_id, shard.first_index, shard.end_index],
    ).fetchall()
    return [WorkRow(**row) for row in rows]


def renew_leases(
    conn: Conn, worker_id: UUID, tokens: Sequence[int], lease_seconds: float
) -> dict[int, Control]:
    """Lengthen leases and bring back what users want of them; a missing token is a lost lease."""
    rows = conn.execute(
        """
        WITH held AS MATERIALIZED (
            SELECT id FROM shards
            WHERE state = 'leased' AND worker_id = %(worker_id)s AND lease_token = ANY(%(tokens)s)
            ORDER BY id FOR NO KEY UPDATE
        )
        UPDATE shards
        SET lease_expires_at = clock_timestamp() + make_interval(secs => %(seconds)s)
        FROM held, jobs
        WHERE shards.id = held.id AND jobs.id = shards.job_id
        RETURNING shards.lease_token, jobs.state = 'paused' AS paused,
            jobs.cancel_requested_at IS NOT NULL AS cancelled,
            jobs.expiry_began_at IS NOT NULL AS expired
        """,
        {"worker_id": worker_id, "tokens": list(tokens), "seconds": lease_seconds},
    ).fetchall()
    return {
        row["lease_token"]: Control(
            cancel=row["cancelled"] or row["expired"],
            pause=row["paused"],
            expired=row["expired"] and not row["cancelled"],
        )
        for row in rows
    }


def finish_shard(
    conn: Conn, shard: LeasedShard, results: Sequence[RequestResult], part: PublishedPart | None
) -> bool:
    """Make a shard done: states, charges, part and counters in one transaction.

    False when the lease was lost: nothing changed, the part is an orphan. True also when this
    very call was done before (its answer may have been lost). `part` may be None only when
    nothing ran. Raises ValueError when `results` are not exactly the shard's pending requests.
    """
    job = lock_job(conn, shard.job_id)
    if job is None:
        return False
    row = conn.execute(
        """
        UPDATE shards SET state = 'done', finished_at = now(), lease_expires_at = NULL,
            worker_id = NULL
        WHERE id = %s AND state = 'leased' AND lease_token = %s
        RETURNING first_index, end_index, attempt
        """,
        [shard.id, shard.lease_token],
    ).fetchone()
    if row is None:
        return _was_finished(conn, shard)
    span = Span(row["first_index"], row["end_index"], row["attempt"])
    if part is not None:
        _name_part(conn, shard, span, part)
    elif any(r.state in (RequestState.succeeded, RequestState.errored) for r in results):
        msg = f"shard {shard.id} has results but no part"
        raise ValueError(msg)
    end_with_results(conn, job, span, results)
    return True


def _was_finished(conn: Conn, shard: LeasedShard) -> bool:
    row = conn.execute(
        "SELECT 1 FROM shards WHERE id = %s AND state = 'done' AND lease_token = %s",
        [shard.id, shard.lease_token],
    ).fetchone()
    return row is not None


def _name_part(conn: Conn, shard: LeasedShard, span: Span, part: PublishedPart) -> None:
    """Make a part the one that counts for its range; an older one is superseded."""
    conn.execute(
        """
        UPDATE parts SET superseded_at = now()
        WHERE job_id = %s AND superseded_at IS NULL AND first_index < %s AND end_index > %s
        """,
        [shard.job_id, span.end_index, span.first_index],
    )
    conn.execute(
        "INSERT INTO parts (lease_token, job_id, first_index, end_index) VALUES (%s, %s, %s, %s)",
        [shard.lease_token, shard.job_id, span.first_index, span.end_index],
    )
    insert_files(conn, shard.job_id, part.files, lease_token=shard.lease_token)


def split_off(conn: Conn, shard: LeasedShard, from_index: int) -> LeasedShard | None:
    """Give the requests from `from_index` on back as a pending shard; return the rest, leased.

    For a worker that stops or whose Job is paused: what it gives back does not count as an
    attempt. None when nothing is left to finish: the lease was lost, or the whole shard was given
    back because `from_index` is its first request or the shard is a group of a reproducible Job,
    which runs again whole.
    """
    job = lock_job(conn, shard.job_id)
    if job is None:
        return None
    if from_index <= shard.first_index or job.reproducible:
        _return_shard(conn, job, shard, attempts_back=1)
        return None
    row = conn.execute(
        """
        UPDATE shards SET end_index = least(end_index, %(from_index)s)
        FROM (SELECT id, end_index AS old_end FROM shards WHERE id = %(id)s) AS before
        WHERE shards.id = before.id AND state = 'leased' AND lease_token = %(token)s
        RETURNING shards.end_index, before.old_end, attempt
        """,
        {"id": shard.id, "token": shard.lease_token, "from_index": from_index},
    ).fetchone()
    if row is None:
        return None
    if row["end_index"] < row["old_end"]:
        tail = Span(row["end_index"], row["old_end"], row["attempt"] - 1)
        _insert_pending(conn, job.id, tail, shard.engine_deaths)
        _count_returned(conn, job.id, len(_pending_indices(conn, job.id, tail)))
        if job.is_stopping:
            stop_pending(conn, job)
    return replace(shard, end_index=row["end_index"])


def give_back_shard(conn: Conn, shard: LeasedShard) -> bool:
    """Give a whole shard back without counting the attempt; False when the lease was lost."""
    job = lock_job(conn, shard.job_id)
    return job is not None and _return_shard(conn, job, shard, attempts_back=1)


def leave_to_newer(conn: Conn, shard: LeasedShard) -> bool:
    """Give back, whole and not counted, a shard that this code cannot read; False if it was lost.

    A Job of which nothing has run is not bound to this worker's engine by the failed try.
    """
    if not give_back_shard(conn, shard):
        return False
    conn.execute(
        """
        UPDATE jobs SET engine = NULL
        WHERE id = %(job_id)s AND NOT EXISTS (SELECT 1 FROM shards
            WHERE shards.job_id = %(job_id)s AND shards.state <> 'pending')
        """,
        {"job_id": shard.job_id},
    )
    return True


def expire_leases(conn: Conn, limit: int) -> int:
    """End expired leases of one Job, at most `limit`; count them, 0 when there are none.

    A shard with several pending requests comes back as two halves (unless its groups are
    fixed): whatever made its worker vanish is narrowed down. No request is ever errored here.
    """
    overdue = conn.execute(
        """
        SELECT job_id FROM shards
        WHERE state = 'leased' AND lease_expires_at < clock_timestamp()
        GROUP BY job_id ORDER BY min(lease_expires_at) LIMIT %s
        """,
        [CANDIDATES_MAX],
    ).fetchall()
    for candidate in overdue:
        ended = 0
        with conn.transaction():
            job = try_lock_job(conn, candidate["job_id"])
            if job is not None:
                ended = _expire_leases_of(conn, job, limit)
            if not ended:
                raise Rollback  # gives the Job's lock back before the next Job is locked
        if ended:
            return ended
    return 0


def _expire_leases_of(conn: Conn, job: Job, limit: int) -> int:
    # SKIP LOCKED: a worker that froze within a heartbeat must not hold up everybody's leases.
    rows = conn.execute(
        """
        SELECT id, job_id, first_index, end_index, lease_token, attempt, engine_deaths FROM shards
        WHERE job_id = %s AND state = 'leased' AND lease_expires_at < clock_timestamp()
        ORDER BY id LIMIT %s FOR NO KEY UPDATE SKIP LOCKED
        """,
        [job.id, limit],
    ).fetchall()
    for row in rows:
        shard = LeasedShard(**row, account_id=job.account_id, reproducible=job.reproducible)
        _return_shard(conn, job, shard, split=not job.reproducible)
    return len(rows)


def report_engine_death(conn: Conn, shard: LeasedShard, *, alone: bool) -> bool:
    """Say that the engine died with this shard in it; True when its one request is to blame.

    `alone`: no other shard was in the engine. The shard becomes pending and a suspect that must
    run alone; with several pending requests it is split in two. A single request that was alone
    at its third death is blamed: the shard stays leased, and the caller finishes it as errored
    with code `engine_died`. False also when the lease was lost.
    """
    job = lock_job(conn, shard.job_id)
    if job is None:
        return False
    row = conn.execute(
        """
        UPDATE shards SET engine_deaths = engine_deaths + 1
        WHERE id = %s AND state = 'leased' AND lease_token = %s
        RETURNING first_index, end_index, attempt, engine_deaths, deaths_alone
        """,
        [shard.id, shard.lease_token],
    ).fetchone()
    if row is None:
        return False
    span = Span(row["first_index"], row["end_index"], row["attempt"])
    single = len(_pending_indices(conn, job.id, span)) == 1
    if single and alone and not job.is_stopping:
        conn.execute("UPDATE shards SET deaths_alone = deaths_alone + 1 WHERE id = %s", [shard.id])
        if row["deaths_alone"] + 1 >= DEATHS_ALONE_MAX:
            return True
    # A fixed group runs again whole, but not for ever: its culprit must be found some time.
    split = not job.reproducible or row["engine_deaths"] >= DEATHS_ALONE_MAX
    _return_shard(conn, job, shard, split=split)
    return False


def _return_shard(
    conn: Conn, job: Job, shard: LeasedShard, *, attempts_back: int = 0, split: bool = False
) -> bool:
    """Make a leased shard pending (two halves when `split`); False when the lease was lost.

    Of a Job that stops, its requests are cancelled or expired instead of waiting again.
    """
    row = conn.execute(
        """
        UPDATE shards SET state = 'pending', lease_token = NULL, lease_expires_at = NULL,
            worker_id = NULL, attempt = attempt - %s
        WHERE id = %s AND state = 'leased' AND lease_token = %s
        RETURNING first_index, end_index, attempt, engine_deaths
        """,
        [attempts_back, shard.id, shard.lease_token],
    ).fetchone()
    if row is None:
        return False
    span = Span(row["first_index"], row["end_index"], row["attempt"])
    pending = _pending_indices(conn, job.id, span)
    _count_returned(conn, job.id, len(pending))
    if job.is_stopping:
        stop_pending(conn, job)
    elif split and len(pending) > 1:
        middle = pending[len(pending) // 2]
        conn.execute("UPDATE shards SET end_index = %s WHERE id = %s", [middle, shard.id])
        _insert_pending(
            conn, job.id, Span(middle, span.end_index, span.attempt), row["engine_deaths"]
        )
    return True


def _pending_indices(conn: Conn, job_id: UUID, span: Span) -> list[int]:
    rows = conn.execute(
        """
        SELECT request_index FROM requests
        WHERE job_id = %s AND request_index >= %s AND request_index < %s AND state = 'pending'
        ORDER BY request_index
        """,
        [job_id, span.first_index, span.end_index],
    ).fetchall()
    return [row["request_index"] for row in rows]


def _insert_pending(conn: Conn, job_id: UUID, span: Span, engine_deaths: int) -> None:
    conn.execute(
        """
        INSERT INTO shards (job_id, first_index, end_index, attempt, engine_deaths)
        VALUES (%s, %s, %s, %s, %s)
        """,
        [job_id, span.first_index, span.end_index, span.attempt, engine_deaths],
    )


def _count_returned(conn: Conn, job_id: UUID, requests: int) -> None:
    conn.execute("UPDATE jobs SET n_running = n_running - %s WHERE id = %s", [requests, job_id])
