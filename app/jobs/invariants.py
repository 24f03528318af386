"""What must always be true of Jobs, requests, shards and parts, as SQL that returns violations.

Together with app/ledger/invariants.py these are the whole truth that Postgres can check by
itself; files are checked against part rows by whoever has the object store.
"""

from app.kit.db import Conn
from app.ledger.invariants import LEDGER_INVARIANTS, Invariant, Violation, find_violations

JOB_INVARIANTS = (
    Invariant(
        "R2",
        "a Job's counters by state equal a recount",
        """
        SELECT jobs.id::text AS subject,
            format('counters %s/%s/%s/%s/%s, recount %s', n_running, n_succeeded, n_errored,
                n_cancelled, n_expired, counted) AS detail
        FROM jobs LEFT JOIN LATERAL (
            SELECT count(*) AS total,
                count(*) FILTER (WHERE state = 'succeeded') AS succeeded,
                count(*) FILTER (WHERE state = 'errored') AS errored,
                count(*) FILTER (WHERE state = 'cancelled') AS cancelled,
                count(*) FILTER (WHERE state = 'expired') AS expired,
                coalesce(sum(prompt_tokens) FILTER (WHERE state = 'succeeded'), 0) AS prompts,
                coalesce(sum(completion_tokens), 0) AS completions
            FROM requests WHERE requests.job_id = jobs.id
        ) AS counted ON true
        LEFT JOIN LATERAL (
            SELECT count(*) AS running FROM shards
            JOIN requests ON requests.job_id = shards.job_id AND requests.state = 'pending'
                AND requests.request_index >= shards.first_index
                AND requests.request_index < shards.end_index
            WHERE shards.job_id = jobs.id AND shards.state = 'leased'
        ) AS leased ON true
        WHERE (jobs.n_total, n_running, n_succeeded, n_errored, n_cancelled, n_expired,
                jobs.prompt_tokens, jobs.completion_tokens)
            IS DISTINCT FROM (total, running, succeeded, errored, cancelled, expired,
                prompts, completions)
        """,
    ),
    Invariant(
        "R2-tokens",
        "a Job's token counters equal the sums of its Holds and entries",
        """
        SELECT jobs.id::text AS subject,
            format('held %s, charged %s, released %s; ledger %s', tokens_held, tokens_charged,
                tokens_released, ledger) AS detail
        FROM jobs LEFT JOIN LATERAL (
            SELECT coalesce(sum(holds.amount) FILTER (WHERE entries.id IS NULL), 0) AS held,
                coalesce(sum(entries.amount) FILTER (WHERE entries.kind = 'settle'), 0) AS charged,
                coalesce(sum(holds.amount) FILTER (WHERE entries.id IS NOT NULL), 0) AS resolved
            FROM holds LEFT JOIN entries ON entries.hold_id = holds.id
            WHERE holds.job_id = jobs.id
        ) AS ledger ON true
        WHERE (tokens_held, tokens_charged, tokens_released)
            IS DISTINCT FROM (held, charged, resolved - charged)
        """,
    ),
    Invariant(
        "R3",
        "a terminal Job has only terminal requests and only finished shards",
        """
        SELECT jobs.id::text AS subject, jobs.state AS detail FROM jobs
        WHERE jobs.finished_at IS NOT NULL AND (
            EXISTS (SELECT 1 FROM requests WHERE job_id = jobs.id AND state = 'pending')
            OR EXISTS (SELECT 1 FROM shards WHERE job_id = jobs.id AND state <> 'done'))
        """,
    ),
    Invariant(
        "R4",
        "a shard is done exactly when none of its requests is pending",
        """
        SELECT shards.id::text AS subject,
            format('Job %s, [%s, %s) is %s', job_id, first_index, end_index, state) AS detail
        FROM shards
        WHERE (state = 'done') = EXISTS (
            SELECT 1 FROM requests WHERE requests.job_id = shards.job_id
                AND requests.request_index >= shards.first_index
                AND requests.request_index < shards.end_index AND requests.state = 'pending')
        """,
    ),
    Invariant(
        "R5",
        "lease tokens come from the sequence, and attempts are counted from their leases",
        """
        SELECT shards.id::text AS subject,
            format('token %s, attempt %s, deaths %s', lease_token, attempt, engine_deaths)
                AS detail
        FROM shards, lease_tokens
        WHERE lease_token > last_value OR attempt < 0 OR (state = 'leased' AND attempt < 1)
            OR deaths_alone > engine_deaths
        """,
    ),
    Invariant(
        "R6",
        "request_index runs from 0 without gaps",
        """
        SELECT jobs.id::text AS subject, format('%s of %s, last %s', found, n_total, last)
            AS detail
        FROM jobs LEFT JOIN LATERAL (
            SELECT count(*) AS found, coalesce(max(request_index), -1) AS last
            FROM requests WHERE job_id = jobs.id
        ) AS counted ON true
        WHERE found <> n_total OR last <> n_total - 1
        """,
    ),
    Invariant(
        "R7",
        "nothing of a Job that stops can be leased any more",
        """
        SELECT jobs.id::text AS subject, format('%s with pending shards', jobs.state) AS detail
        FROM jobs
        WHERE (cancel_requested_at IS NOT NULL OR expiry_began_at IS NOT NULL)
            AND EXISTS (SELECT 1 FROM shards WHERE job_id = jobs.id AND state = 'pending')
        """,
    ),
    Invariant(
        "R8",
        "the shards of a Job tile its requests",
        """
        SELECT job_id::text AS subject,
            format('[%s, %s) comes after %s', first_index, end_index, before) AS detail
        FROM (
            SELECT job_id, first_index, end_index, n_total,
                coalesce(lag(end_index) OVER tiles, 0) AS before,
                lead(first_index) OVER tiles AS after
            FROM shards JOIN jobs ON jobs.id = shards.job_id
            WINDOW tiles AS (PARTITION BY job_id ORDER BY first_index)
        ) AS tiles
        WHERE first_index <> before OR (after IS NULL AND end_index <> n_total)
        """,
    ),
    Invariant(
        "P1",
        "a succeeded request, and every request of a finished Job, lies in one part that counts",
        """
        SELECT format('%s/%s', requests.job_id, requests.request_index) AS subject,
            format('%s, in %s parts', requests.state, count(parts.lease_token)) AS detail
        FROM requests JOIN jobs ON jobs.id = requests.job_id
        LEFT JOIN parts ON parts.job_id = requests.job_id
            AND parts.superseded_at IS NULL AND requests.request_index >= parts.first_index
            AND requests.request_index < parts.end_index
        WHERE requests.state IN ('succeeded', 'errored') OR jobs.finished_at IS NOT NULL
        GROUP BY requests.job_id, requests.request_index, requests.state
        HAVING count(parts.lease_token) <> 1
        """,
    ),
    Invariant(
        "P2",
        "the parts that count do not overlap",
        """
        SELECT part.lease_token::text AS subject, format('overlaps %s', other.lease_token)
            AS detail
        FROM parts AS part JOIN parts AS other ON other.job_id = part.job_id
            AND other.lease_token > part.lease_token AND other.superseded_at IS NULL
            AND other.first_index < part.end_index AND other.end_index > part.first_index
        WHERE part.superseded_at IS NULL
        """,
    ),
    Invariant(
        "P3",
        "a part that counts covers finished shards only and has one results file",
        """
        SELECT parts.lease_token::text AS subject,
            format('Job %s, [%s, %s), %s results files', parts.job_id, parts.first_index,
                parts.end_index, files.results) AS detail
        FROM parts
        LEFT JOIN LATERAL (
            SELECT count(*) FILTER (WHERE kind = 'results') AS results FROM result_files
            WHERE result_files.lease_token = parts.lease_token
                AND result_files.job_id = parts.job_id
        ) AS files ON true
        WHERE parts.superseded_at IS NULL AND (results <> 1 OR EXISTS (
            SELECT 1 FROM shards WHERE shards.job_id = parts.job_id
                AND shards.first_index < parts.end_index AND shards.end_index > parts.first_index
                AND (shards.state <> 'done' OR shards.first_index < parts.first_index
                    OR shards.end_index > parts.end_index)))
        """,
    ),
    Invariant(
        "P3-token",
        "a result comes from the part whose token finished its shard",
        """
        SELECT parts.lease_token::text AS subject,
            format('Job %s, [%s, %s)', parts.job_id, parts.first_index, parts.end_index) AS detail
        FROM parts
        WHERE parts.superseded_at IS NULL
            AND NOT EXISTS (SELECT 1 FROM shards WHERE shards.lease_token = parts.lease_token
                AND shards.job_id = parts.job_id AND shards.state = 'done'
                AND shards.first_index = parts.first_index AND shards.end_index = parts.end_index)
            AND EXISTS (SELECT 1 FROM requests WHERE requests.job_id = parts.job_id
                AND requests.request_index >= parts.first_index
                AND requests.request_index < parts.end_index AND requests.state = 'succeeded')
        """,
    ),
    Invariant(
        "P4",
        "a Job's own files are named only once it is terminal",
        """
        SELECT format('%s/%s', job_id, path) AS subject, jobs.state AS detail
        FROM result_files JOIN jobs ON jobs.id = result_files.job_id
        WHERE result_files.lease_token IS NULL AND jobs.finished_at IS NULL
        """,
    ),
)

INVARIANTS = LEDGER_INVARIANTS + JOB_INVARIANTS


def check_invariants(conn: Conn) -> list[Violation]:
    """Check every rule in the caller's transaction; use REPEATABLE READ while others write."""
    return find_violations(conn, INVARIANTS)
