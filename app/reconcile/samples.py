"""Samples of throughput: what ended and was charged since the sample before, for the dashboard.

Counts come from the Jobs' own counters, of Jobs that live or ended lately, against what was counted
before (`sampled_jobs`); no request is ever looked at. One process samples at a time, and a lost
sample is made up for by the next, whose `seconds` say how long it covers.
"""

from typing import Final

from app.kit.db import Conn, Database

SPACING_SECONDS: Final = 4.0  # two reconcilers do not sample twice
LATELY_MINUTES: Final = 15
KEPT_HOURS: Final = 48
FIRST_SECONDS: Final = 5.0  # a first sample counts nothing; it only remembers where it began


def take_sample(database: Database) -> None:
    """Write one sample and forget old ones, unless another process has just done so."""
    with database.transaction() as conn:
        held = conn.execute(
            "SELECT pg_try_advisory_xact_lock(hashtextextended('samples', 0)) AS held"
        ).fetchone()
        if held and held["held"] and _write(conn):
            _forget(conn)


def _write(conn: Conn) -> bool:
    written = conn.execute(
        """
        WITH before AS (SELECT max(at) AS at FROM samples),
        seen AS (
            SELECT id, n_succeeded + n_errored AS requests, n_errored AS errored,
                tokens_charged AS tokens
            FROM jobs WHERE finished_at IS NULL
            UNION ALL
            SELECT id, n_succeeded + n_errored, n_errored, tokens_charged
            FROM jobs WHERE finished_at > now() - make_interval(mins => %(lately)s)
        ),
        grown AS (
            SELECT coalesce(sum(greatest(seen.requests - coalesce(old.requests, 0), 0)), 0)
                    AS requests,
                coalesce(sum(greatest(seen.errored - coalesce(old.errored, 0), 0)), 0) AS errored,
                coalesce(sum(greatest(seen.tokens - coalesce(old.tokens, 0), 0)), 0) AS tokens
            FROM seen LEFT JOIN sampled_jobs AS old ON old.job_id = seen.id
        ),
        answered AS (
            SELECT count(*) AS requests, count(*) FILTER (WHERE error_code IS NOT NULL) AS errored,
                coalesce(sum(tokens_charged), 0) AS tokens
            FROM completions, before
            WHERE finished_at > before.at AND finished_at <= now()
        ),
        due AS (
            SELECT before.at IS NULL AS is_first,
                coalesce(extract(epoch FROM now() - before.at), %(first)s)::real AS seconds
            FROM before
            WHERE before.at IS NULL OR before.at < now() - make_interval(secs => %(spacing)s)
        ),
        remembered AS (
            INSERT INTO sampled_jobs (job_id, requests, errored, tokens)
            SELECT seen.id, seen.requests, seen.errored, seen.tokens FROM seen, due
            ON CONFLICT (job_id) DO UPDATE SET requests = excluded.requests,
                errored = excluded.errored, tokens = excluded.tokens
            WHERE (sampled_jobs.requests, sampled_jobs.errored, sampled_jobs.tokens)
                IS DISTINCT FROM (excluded.requests, excluded.errored, excluded.tokens)
        )
        INSERT INTO samples (at, seconds, requests, errored, tokens)
        SELECT now(), due.seconds,
            CASE WHEN is_first THEN 0 ELSE grown.requests + answered.requests END,
            CASE WHEN is_first THEN 0
                ELSE least(grown.errored + answered.errored, grown.requests + answered.requests)
            END,
            CASE WHEN is_first THEN 0 ELSE grown.tokens + answered.tokens END
        FROM due, grown, answered
        """,
        {"lately": LATELY_MINUTES, "first": FIRST_SECONDS, "spacing": SPACING_SECONDS},
    )
    return written.rowcount == 1


def _forget(conn: Conn) -> None:
    conn.execute("DELETE FROM samples WHERE at < now() - make_interval(hours => %s)", [KEPT_HOURS])
    conn.execute(
        """
        DELETE FROM sampled_jobs USING jobs
        WHERE jobs.id = job_id AND finished_at < now() - make_interval(mins => %s)
        """,
        [2 * LATELY_MINUTES],
    )
