"""How long pages of the dashboard take in a database of 5,000 Jobs and a million requests.

Nearly all Jobs are over; a few run, wait, or were errored in part. Rows are made by the database
itself and obey the schema; one account of many has most of the Completions, with their Holds and
entries, and thousands of keys. The time is the server's and the client's together, over HTTP, with
a session like an operator's. Besides, every statement that a page runs is explained: no plan may
scan the requests, the Completions or their ledger, and the figure rows_read_max is the most rows of
the requests that any page reads.

    python -m bench.dashboard [--jobs 5000] [--requests 1000000] [--completions 300000]
        [--accounts 100000] [--looks 15]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlencode
from uuid import UUID

import httpx
import psycopg
from fastapi.testclient import TestClient
from pydantic import SecretStr

from app.accounts.accounts import MintedKey, create_account, create_key
from app.kit import db
from app.kit.ids import public_id
from app.main import create_app
from app.settings import Settings
from bench.jobs_intake import free_port
from bench.report import machine, save
from bench.service_parts import PEPPER, BareService
from tests.fixtures.tiny_model import write_tiny_model

FIGURE = "dashboard.page_ms_max"
BUDGET_MS = 300
LARGE_JOB = 200_000  # the most that one Job may have
LONG_JOB = 60_000  # of small shards, and it runs
SHARD = 512
ERRORED_EACH = 500
PLAN_ROWS_MAX = 60_000  # what the slowest bounded walk may touch: 20,000 requests, thrice
OWNERS = 40  # accounts that have Jobs
KEYS = 5000
ACTS = 200_000
LARGE_TABLES = ("requests", "completions", "holds", "entries", "audit_log")

SPEC_FUNCTION = """
CREATE FUNCTION pg_temp.spec_of(k integer) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_build_object('prompt_token_ids',
        jsonb_build_array(k, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19),
        'sampling', jsonb_build_object('max_tokens', 16, 'temperature', 0.0)) $$
"""

JOBS = """
CREATE TEMP TABLE made AS
SELECT gen_random_uuid() AS id, k, (k <= %(open)s) AS is_open,
    CASE k WHEN 1 THEN %(large)s WHEN 2 THEN %(long)s ELSE %(size)s END AS total,
    CASE k WHEN 2 THEN 16 ELSE %(shard)s END AS shard_size,
    CASE WHEN k = 1 THEN %(large)s / %(each)s WHEN k %% 25 = 0 THEN 2 ELSE 0 END AS errored
FROM generate_series(1, %(jobs)s) AS k
"""

INSERT_JOBS = """
INSERT INTO jobs (id, account_id, state, name, model, model_revision, dtype, n_total, n_succeeded,
    n_errored, prompt_tokens, completion_tokens, tokens_charged, created_at, started_at,
    ended_running_at, finished_at, expires_at)
SELECT id, (SELECT array_agg(a.id ORDER BY a.id) FROM accounts a)[1 + k %% %(accounts)s],
    CASE WHEN is_open THEN 'in_progress' ELSE 'completed' END,
    CASE WHEN k %% 3 = 0 THEN 'sweep ' ELSE 'study ' END || k, 'tiny', 'revision-1', 'float32',
    total, CASE WHEN is_open THEN 0 ELSE total - errored END, CASE WHEN is_open THEN 0
        ELSE errored END, 20 * total, 16 * total, 36 * total, now() - k * interval '7 minutes',
    now() - k * interval '7 minutes', CASE WHEN NOT is_open THEN now() - interval '1 minute' END,
    CASE WHEN NOT is_open THEN now() - interval '1 minute' END, now() + interval '7 days'
FROM made
"""

INSERT_REQUESTS = """
INSERT INTO requests (job_id, request_index, custom_id, state, spec, prompt_tokens,
    completion_tokens, attempt, error_code, error_message, finished_at)
SELECT id, i, 'c-' || i,
    CASE WHEN is_open THEN 'pending' WHEN is_bad THEN 'errored' ELSE 'succeeded' END,
    pg_temp.spec_of(i), 20, CASE WHEN NOT is_open AND NOT is_bad THEN 16 END,
    CASE WHEN NOT is_open THEN 1 END,
    CASE WHEN NOT is_open AND is_bad THEN 'steering_failed' END,
    CASE WHEN NOT is_open AND is_bad THEN 'It failed.' END, CASE WHEN NOT is_open THEN now() END
FROM made CROSS JOIN LATERAL (
    SELECT i, i %% (total / greatest(errored, 1)) = 0 AND errored > 0
        AND i / (total / greatest(errored, 1)) < errored AS is_bad
    FROM generate_series(0, total - 1) AS i
) AS each_one
WHERE k > %(first)s AND k <= %(last)s
"""

INSERT_SHARDS = """
INSERT INTO shards (job_id, first_index, end_index, state, attempt, finished_at)
SELECT id, i, least(i + shard_size, total), CASE WHEN is_open THEN 'pending' ELSE 'done' END,
    CASE WHEN is_open THEN 0 ELSE 1 END, CASE WHEN NOT is_open THEN now() END
FROM made CROSS JOIN LATERAL generate_series(0, total - 1, shard_size) AS i
"""

# Somewhere in the long Job two shards are leased, far from each other.
LEASE_SHARDS = """
UPDATE shards SET state = 'leased', attempt = 1, lease_token = nextval('lease_tokens'),
    worker_id = (SELECT id FROM workers LIMIT 1), leased_at = now(),
    lease_expires_at = now() + interval '1 hour'
WHERE job_id = (SELECT id FROM made WHERE k = 2) AND first_index IN (16000, 40000)
"""

INSERT_PARTS = """
WITH published AS (
    INSERT INTO parts (lease_token, job_id, first_index, end_index)
    SELECT nextval('lease_tokens'), job_id, first_index, end_index
    FROM shards WHERE state = 'done' RETURNING *
)
INSERT INTO result_files (job_id, path, lease_token, kind, rows, bytes, sha256, first_index,
    end_index)
SELECT job_id, 'results/part-' || lpad(first_index::text, 7, '0') || '.' || lease_token
        || '.parquet', lease_token, 'results', end_index - first_index, 100000, repeat('0', 64),
    first_index, end_index
FROM published
"""

COMPLETIONS = """
WITH made AS (
    INSERT INTO completions (id, account_id, model, state, prompt_tokens, tokens_held,
        completion_tokens, tokens_charged, error_code, error_message, worker_id, claimed_at,
        created_at, deadline, finished_at)
    SELECT gen_random_uuid(), %(account)s, 'tiny',
        CASE WHEN k %% 50 = 0 THEN 'errored' ELSE 'succeeded' END, 20, 36,
        CASE WHEN k %% 50 > 0 THEN 16 END, CASE WHEN k %% 50 > 0 THEN 36 ELSE 0 END,
        CASE WHEN k %% 50 = 0 THEN 'steering_failed' END,
        CASE WHEN k %% 50 = 0 THEN 'It failed.' END,
        gen_random_uuid(), at, at, at + interval '10 minutes', at
    FROM generate_series(1, %(completions)s) AS k, LATERAL (
        SELECT now() - k * interval '1 second' AS at) AS moment
    RETURNING id, account_id, tokens_held, created_at
)
INSERT INTO holds (account_id, completion_id, version, amount, created_at)
SELECT account_id, id, 1, tokens_held, created_at FROM made
"""

ENTRIES = """
INSERT INTO entries (account_id, kind, amount, hold_id, created_at)
SELECT account_id, 'settle', amount, id, created_at FROM holds ORDER BY id
"""

KEYS_OF_ONE = """
INSERT INTO api_keys (id, account_id, name, digest, last4, scopes)
SELECT gen_random_uuid(), %(account)s, 'key ' || k, sha256(convert_to(k::text, 'UTF8')),
    lpad((k %% 10000)::text, 4, '0'), ARRAY['completions']
FROM generate_series(1, %(keys)s) AS k
"""

MORE_ACCOUNTS = """
INSERT INTO accounts (id, name, created_at)
SELECT gen_random_uuid(), 'account ' || k, now() - k * interval '1 minute'
FROM generate_series(1, %(accounts)s) AS k
"""

AUDIT = """
INSERT INTO audit_log (at, key_id, name, role, action, target, after)
SELECT now() - k * interval '1 minute', %(key)s, 'bench', 'operator',
    CASE WHEN k %% 3 = 0 THEN 'job.cancel' ELSE 'login' END,
    CASE WHEN k %% 3 = 0 THEN %(target)s ELSE 'key_' || (k %% 50) END, '{"state": "cancelling"}'
FROM generate_series(%(acts)s, 1, -1) AS k
"""

OTHERS = """
INSERT INTO samples (at, seconds, requests, errored, tokens)
SELECT now() - k * interval '5 seconds', 5, 40 + k %% 7, 0, 1400 + k %% 90
FROM generate_series(1, 17280) AS k;
INSERT INTO workers (id, model, model_revision, dtype, engine, mode, host, pid, state,
    heartbeat_at, ready_at, last_canary_at, canary)
SELECT gen_random_uuid(), 'tiny', 'revision-1', 'float32', 'stub 1', 'eager', 'host-' || k, k,
    CASE WHEN k <= 12 THEN 'ready' ELSE 'gone' END,
    now() - CASE WHEN k <= 12 THEN 0 ELSE k END * interval '1 minute', now(), now(), 'passed'
FROM generate_series(1, 2000) AS k;
"""


def fill(conn: psycopg.Connection[Any], jobs: int, requests: int) -> dict[str, UUID]:
    """Make everything; give the ids of a large, a running and an ordinary Job."""
    large = min(LARGE_JOB, requests // 4)
    size = max((requests - large - LONG_JOB) // (jobs - 2), 2)
    names = {"jobs": jobs, "open": 0, "large": large, "size": size, "each": ERRORED_EACH}
    names |= {"long": LONG_JOB, "shard": SHARD}
    conn.execute(SPEC_FUNCTION)
    conn.execute(JOBS, names)
    conn.execute("UPDATE made SET is_open = true, errored = 0 WHERE k BETWEEN 2 AND 9")
    conn.execute(INSERT_JOBS, {"accounts": OWNERS})
    for first in range(0, jobs, 500):
        conn.execute(INSERT_REQUESTS, {"first": first, "last": first + 500})
    conn.execute(INSERT_SHARDS)
    conn.execute(INSERT_PARTS)
    for statement in OTHERS.replace("%%", "%").split(";\n"):
        if statement.strip():
            conn.execute(statement)
    conn.execute(LEASE_SHARDS)
    rows = conn.execute("SELECT k, id FROM made WHERE k IN (1, 2, 50) ORDER BY k").fetchall()
    return dict(zip(("large", "running", "ordinary"), (row[1] for row in rows), strict=True))


def fill_account(
    conn: psycopg.Connection[Any], key: MintedKey, job: UUID, options: argparse.Namespace
) -> None:
    """Give the account of a key its Completions, keys and acts, and make many other accounts."""
    account = key.account_id
    conn.execute(COMPLETIONS, {"account": account, "completions": options.completions})
    conn.execute(ENTRIES)
    conn.execute(KEYS_OF_ONE, {"account": account, "keys": KEYS})
    conn.execute(MORE_ACCOUNTS, {"accounts": options.accounts})
    conn.execute(AUDIT, {"key": key.id, "target": public_id("job", job), "acts": ACTS})


def pages_of_account(account: UUID, key: UUID, job: UUID) -> dict[str, str]:
    """Name the pages of accounts and of the audit log."""
    here, name = f"/admin/accounts/{public_id('acct', account)}", public_id("key", key)
    about = urlencode({"target": public_id("job", job)})
    return {
        "accounts": "/admin/accounts",
        "accounts by name": "/admin/accounts?name=account+77",
        "accounts by a name that none has": "/admin/accounts?name=nobody+is+called+so",
        "accounts that are stopped": "/admin/accounts?holds=stopped",
        "account": here,
        "account, older keys": f"{here}?keys_before=key_{'8' * 32}",
        "ledger": f"{here}/ledger",
        "ledger, far back": f"{here}/ledger?before=1000",
        "ledger, grants": f"{here}/ledger?kind=grants",
        "audit log": "/admin/audit",
        "audit log, far back": "/admin/audit?before=1000",
        "audit log by act": "/admin/audit?action=job.cancel",
        "audit log by an act that none was": "/admin/audit?action=holds.stop",
        "audit log by thing": f"/admin/audit?{about}",
        "audit log by key": f"/admin/audit?key={name}",
        "audit log by all three": f"/admin/audit?action=login&{about}&key={name}",
    }


def pages(ids: Mapping[str, UUID], account: UUID) -> dict[str, str]:
    """Name every page of Jobs, and the ones with filters that find little."""
    found = {
        "overview": "/admin",
        "jobs": "/admin/jobs",
        "jobs, unfinished": "/admin/jobs?status=unfinished",
        "jobs of a state that none has": "/admin/jobs?status=failed",
        "jobs by name": "/admin/jobs?q=sweep",
        "jobs by a name that none has": "/admin/jobs?q=nothing+is+called+so",
        "jobs of an account": f"/admin/jobs?account={public_id('acct', account)}",
        "bulk cancel, counted": "/admin/jobs/cancel?status=unfinished",
        "workers": "/admin/workers",
        "models": "/admin/models",
        "system": "/admin/system",
    }
    for name, job_id in ids.items():
        path = f"/admin/jobs/{public_id('job', job_id)}"
        found |= {
            f"{name} Job": path,
            f"{name} Job, samples": f"{path}/samples",
            f"{name} Job, files": f"{path}/files",
            f"{name} Job, requests": f"{path}/requests",
            f"{name} Job, errored requests": f"{path}/requests?status=errored",
            f"{name} Job, cancelled requests": f"{path}/requests?status=cancelled",
            f"{name} Job, waiting requests": f"{path}/requests?status=pending",
            f"{name} Job, running requests": f"{path}/requests?status=running",
            f"{name} Job, one custom_id": f"{path}/requests?custom_id=c-7",
            f"{name} Job, one request": f"{path}/requests/7",
        }
    return found


@contextmanager
def operator(address: str, key: str) -> Iterator[httpx.Client]:
    """Log in; every request then comes as from a page of the dashboard."""
    headers = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "navigate"}
    with httpx.Client(base_url=address, headers=headers, trust_env=False, timeout=60.0) as client:
        answer = client.post("/admin/login", data={"key": key})
        assert answer.status_code == 303, answer.text
        yield client


def look(client: httpx.Client, path: str, looks: int) -> list[float]:
    """Load a page again and again; give the milliseconds of each time, the first left out."""
    times = []
    for number in range(looks + 1):
        started = time.perf_counter()
        answer = client.get(path)
        seconds = time.perf_counter() - started
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:300]}"
        if number:
            times.append(1000 * seconds)
    return times


class Explaining(psycopg.Cursor[Any]):
    """Runs every reading statement twice: first explained, its plan kept in `plans`."""

    plans: ClassVar[list[dict[str, Any]]] = []

    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        """Explain a statement that only reads, then run it."""
        text = query.strip() if isinstance(query, str) else ""
        if text.startswith(("SELECT", "WITH")) and "INSERT" not in text:
            super().execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}", params, **options)
            row = self.fetchone()
            assert row is not None
            self.plans.append(next(iter(row.values()))[0]["Plan"])
        return super().execute(query, params, **options)


def scans(plan: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Give every scan of a plan: its kind, its table, how many rows it read."""
    if "Relation Name" in plan:
        rows = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
        rows += plan.get("Rows Removed by Index Recheck", 0)
        yield plan["Node Type"], plan["Relation Name"], rows * plan["Actual Loops"]
    for inner in plan.get("Plans", ()):
        yield from scans(inner)


def rows_read(settings: Settings, key: str, paths: Mapping[str, str]) -> dict[str, float]:
    """Load every page once with its statements explained; give the rows of requests it read.

    Raises AssertionError when a plan reads a whole table of requests, or too much of it.
    """
    usual = db.session_settings
    db.session_settings = lambda: {**usual(), "cursor_factory": Explaining}
    read = {}
    headers = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "navigate"}
    try:
        with TestClient(create_app(settings), headers=headers, follow_redirects=False) as client:
            assert client.post("/admin/login", data={"key": key}).status_code == 303
            for name, path in paths.items():
                Explaining.plans.clear()
                assert client.get(path).status_code == 200, path
                found = [scan for plan in Explaining.plans for scan in scans(plan)]
                whole = [scan for scan in found if scan[0] == "Seq Scan"]
                assert not [scan for scan in whole if scan[1] in LARGE_TABLES], (name, whole)
                ours = [scan for scan in found if scan[1] == "requests"]
                read[name] = sum(rows for _, _, rows in ours)
                assert read[name] <= PLAN_ROWS_MAX, (name, ours)
    finally:
        db.session_settings = usual
    return read


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, float], list[str]]:
    """Fill a database and load every page; give figures and lines of the table."""
    models = write_tiny_model(folder)
    with BareService(folder, models, fsync=False) as service:
        started = time.perf_counter()
        with service.database.transaction() as conn:
            accounts = [create_account(conn, f"account {number}") for number in range(OWNERS - 1)]
            key = create_key(
                conn, accounts[0], PEPPER, name="bench", scopes={"admin"}, role="operator"
            )
        with psycopg.connect(service.postgres.url, autocommit=True) as conn:
            ids = fill(conn, options.jobs, options.requests)
            fill_account(conn, key, ids["large"], options)
            if options.statistics:
                conn.execute("VACUUM ANALYZE")
            row = conn.execute("SELECT count(*) FROM requests").fetchone()
        assert row is not None
        total = row[0]
        print(f"{total} requests made in {time.perf_counter() - started:.0f} s", flush=True)
        paths = pages(ids, accounts[0]) | pages_of_account(accounts[0], key.id, ids["large"])
        process, address = service.start_api(free_port())
        with operator(address, key.secret) as client:
            times = {name: look(client, path, options.looks) for name, path in paths.items()}
        process.terminate()
        settings = Settings(
            database_url=service.postgres.url,
            redis_url=service.redis.url,
            object_store=(folder / "objects").as_uri(),
            models_file=models,
            key_pepper=SecretStr(PEPPER),
        )
        read = rows_read(settings, key.secret, paths)
    return _report(times, read, options, total)


def _report(
    times: Mapping[str, list[float]],
    read: Mapping[str, float],
    options: argparse.Namespace,
    total: int,
) -> tuple[dict[str, float], list[str]]:
    slowest = {name: max(each) for name, each in times.items()}
    figures = {
        FIGURE: round(max(slowest.values()), 1),
        "dashboard.page_ms_median_max": round(max(map(statistics.median, times.values())), 1),
        "dashboard.rows_read_max": max(read.values()),
        "dashboard.requests": total,
        "dashboard.jobs": options.jobs,
        "dashboard.completions": options.completions,
        "dashboard.accounts": options.accounts,
    }
    lines = [
        machine("psycopg", "fastapi", "jinja2"),
        "",
        f"{options.jobs:,} Jobs, {total:,} requests, {options.accounts:,} accounts, {ACTS:,} acts;",
        f"one account has {options.completions:,} Completions and {KEYS:,} keys.",
        f"Each page {options.looks} times over HTTP.",
        "Rows: what a page reads of `requests`, by EXPLAIN ANALYZE; nothing scans a large table.",
        "",
        "| page | median ms | slowest ms (< 300) | rows of requests |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {statistics.median(each):.1f} | {max(each):.1f} | {read[name]:,.0f} |"
        for name, each in times.items()
    ]
    return figures, lines


def main() -> None:
    """Measure, print, and write the results unless the size is a smaller one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--completions", type=int, default=300_000)
    parser.add_argument("--accounts", type=int, default=100_000)
    parser.add_argument("--looks", type=int, default=15)
    parser.add_argument(
        "--no-statistics",
        dest="statistics",
        action="store_false",
        help="measure the first minutes of a new database: nothing is analyzed; writes no result",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tiller-dashboard-") as folder:
        figures, lines = measure(options, Path(folder))
    print("\n".join(lines))
    if options.requests >= 1_000_000 and options.statistics:
        save("dashboard", "Pages of the dashboard in a full database", figures, lines)
    worst = figures[FIGURE]
    print(f"{FIGURE} = {worst} (budget {BUDGET_MS})")


if __name__ == "__main__":
    main()
