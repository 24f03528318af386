"""How long a look at a Job takes, in a database that holds many millions of requests.

Half of the requests belong to one Job that runs, a fifth of a percent of them errored (so its
error summary has a lot to count); the others to finished Jobs of a thousand requests, and to one
of three. Rows are made by the database itself and obey every constraint of the schema; Holds are
left out, because no read of a Job looks at them. The time is the client's, over HTTP.
"""

import argparse
import statistics
import time
from pathlib import Path
from uuid import UUID

import httpx
import psycopg

from app.kit.ids import public_id
from bench.jobs_intake import free_port
from bench.service_parts import BareService
from tests.fixtures.tiny_model import write_tiny_model

FIGURE = "jobs.status_p99_ms"
SMALL_JOB = 1000
ERRORED_EACH = 500
BATCH = 500_000
WARM = 100


def fill(
    conn: psycopg.Connection[tuple[object, ...]], account: UUID, total: int
) -> dict[str, UUID]:
    """Make the Jobs and their requests; give the ids of a huge, a middle and a tiny one."""
    half = total // 2
    jobs = {
        "huge": _add_job(conn, account, half, running=True),
        "tiny": _add_job(conn, account, 3, running=True),
    }
    _add_requests(conn, jobs["huge"], half)
    _add_requests(conn, jobs["tiny"], 3)
    conn.execute(
        """
        INSERT INTO jobs (id, account_id, state, model, model_revision, dtype, n_total,
            n_succeeded, prompt_tokens, completion_tokens, tokens_charged,
            created_at, started_at, ended_running_at, finished_at, expires_at)
        SELECT gen_random_uuid(), %(account)s, 'completed', 'tiny', 'revision-1', 'float32',
            %(size)s, %(size)s, 20 * %(size)s, 16 * %(size)s, 36 * %(size)s,
            now() - interval '2 hours' - k * interval '1 second', now() - interval '1 hour',
            now() - interval '1 hour', now() - interval '1 hour', now() + interval '1 day'
        FROM generate_series(1, %(jobs)s) AS k
        """,
        {"account": account, "size": SMALL_JOB, "jobs": max((total - half) // SMALL_JOB, 1)},
    )
    conn.execute("CREATE TEMP TABLE small AS SELECT id FROM jobs WHERE state = 'completed'")
    conn.execute("ALTER TABLE small ADD COLUMN number integer GENERATED ALWAYS AS IDENTITY")
    row = conn.execute("SELECT count(*), min(id::text) FROM small").fetchone()
    assert row is not None
    count = int(str(row[0]))
    for first in range(0, count, BATCH // SMALL_JOB):
        conn.execute(
            """
            INSERT INTO requests (job_id, request_index, custom_id, state, spec, prompt_tokens,
                completion_tokens, attempt, finished_at)
            SELECT id, k, 'c-' || k, 'succeeded', pg_temp.spec_of(k), 20, 16, 1, now()
            FROM small, generate_series(0, %(last)s) AS k
            WHERE number > %(first)s AND number <= %(end)s
            """,
            {"last": SMALL_JOB - 1, "first": first, "end": first + BATCH // SMALL_JOB},
        )
    jobs["finished"] = UUID(str(row[1]))
    return jobs


def _add_job(
    conn: psycopg.Connection[tuple[object, ...]], account: UUID, total: int, *, running: bool
) -> UUID:
    """Add a Job of which half is done, with one error in so many of that half."""
    done = total // 2
    errored = len(range(0, done, ERRORED_EACH))
    row = conn.execute(
        """
        INSERT INTO jobs (id, account_id, state, model, model_revision, dtype, n_total,
            n_succeeded, n_errored, prompt_tokens, completion_tokens, tokens_charged,
            tokens_held, started_at, expires_at)
        VALUES (gen_random_uuid(), %(account)s, %(state)s, 'tiny', 'revision-1', 'float32',
            %(total)s, %(done)s - %(errored)s, %(errored)s, 20 * (%(done)s - %(errored)s),
            16 * (%(done)s - %(errored)s), 36 * (%(done)s - %(errored)s),
            36 * (%(total)s - %(done)s), now(), now() + interval '1 day')
        RETURNING id
        """,
        {
            "account": account,
            "state": "in_progress" if running else "queued",
            "total": total,
            "done": done,
            "errored": errored,
        },
    ).fetchone()
    assert row is not None
    return UUID(str(row[0]))


def _add_requests(conn: psycopg.Connection[tuple[object, ...]], job_id: UUID, total: int) -> None:
    for first in range(0, total, BATCH):
        conn.execute(
            """
            INSERT INTO requests (job_id, request_index, custom_id, state, spec, prompt_tokens,
                completion_tokens, attempt, error_code, error_message, finished_at)
            SELECT %(job)s, k, 'c-' || k,
                CASE WHEN k >= %(done)s THEN 'pending'
                    WHEN k %% %(each)s = 0 THEN 'errored' ELSE 'succeeded' END,
                pg_temp.spec_of(k), 20,
                CASE WHEN k < %(done)s AND k %% %(each)s <> 0 THEN 16 END,
                CASE WHEN k < %(done)s THEN 1 END,
                CASE WHEN k < %(done)s AND k %% %(each)s = 0 THEN 'steering_failed' END,
                CASE WHEN k < %(done)s AND k %% %(each)s = 0 THEN 'It failed.' END,
                CASE WHEN k < %(done)s THEN now() END
            FROM generate_series(%(first)s::integer, %(last)s::integer) AS k
            """,
            {
                "job": job_id,
                "done": total // 2,
                "each": ERRORED_EACH,
                "first": first,
                "last": min(first + BATCH, total) - 1,
            },
        )
    conn.execute(
        """
        INSERT INTO shards (job_id, first_index, end_index, state, finished_at)
        SELECT %(job)s, k, least(k + 512, %(total)s), CASE WHEN k + 512 <= %(done)s THEN 'done'
            ELSE 'pending' END, CASE WHEN k + 512 <= %(done)s THEN now() END
        FROM generate_series(0, %(total)s - 1, 512) AS k
        """,
        {"job": job_id, "total": total, "done": total // 2},
    )


SPEC_FUNCTION = """
CREATE FUNCTION pg_temp.spec_of(k integer) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_build_object('prompt_token_ids',
        jsonb_build_array(k, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19),
        'sampling', jsonb_build_object('max_tokens', 16, 'temperature', 0.0)) $$
"""


def look_many_times(address: str, key: str, job_id: UUID, looks: int) -> list[float]:
    """Read a Job again and again over one connection; give the milliseconds of each look."""
    path = f"{address}/v1/jobs/{public_id('job', job_id)}"
    headers = {"authorization": f"Bearer {key}"}
    times = []
    with httpx.Client(headers=headers, trust_env=False) as client:
        for number in range(WARM + looks):
            started = time.perf_counter()
            answer = client.get(path)
            seconds = time.perf_counter() - started
            assert answer.is_success, answer.text
            if number >= WARM:
                times.append(1000 * seconds)
    return times


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, float], list[str]]:
    """Fill a database and look at Jobs of every size; give figures and lines of the table."""
    total: int = options.status_requests
    with BareService(folder, write_tiny_model(folder), fsync=False) as service:
        started = time.perf_counter()
        with psycopg.connect(service.postgres.url, autocommit=True) as conn:
            conn.execute(SPEC_FUNCTION)
            jobs = fill(conn, service.account_id, total)
            conn.execute("VACUUM ANALYZE")
            row = conn.execute("SELECT count(*) FROM requests").fetchone()
        assert row is not None
        print(f"{row[0]} requests made in {time.perf_counter() - started:.0f} s", flush=True)
        _, address = service.start_api(free_port())
        times = {
            name: look_many_times(address, service.api_key, job_id, options.status_looks)
            for name, job_id in jobs.items()
        }
    p99 = {name: statistics.quantiles(each, n=100)[98] for name, each in times.items()}
    figures = {FIGURE: round(max(p99.values()), 2)}
    lines = []
    for name, value in p99.items():
        middle = statistics.median(times[name])
        figures[f"{FIGURE}.{name}"] = round(value, 2)
        figures[f"jobs.status_median_ms.{name}"] = round(middle, 2)
        lines.append(
            f"| GET of the {name} Job among {row[0]} requests, ms: 99th percentile (median) of "
            f"{options.status_looks} looks | {value:.1f} ({middle:.1f}) | < 20 |"
        )
    return figures, lines
