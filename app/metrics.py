"""GET /metrics: what Prometheus scrapes, from this process and from Postgres.

Workers and reconcilers have no port of their own: they write heartbeats, samples and audit runs
into Postgres, and every API process tells the same about them. Each query is bounded by an index
or by the number of Jobs and has a time limit; answers are kept for some seconds, so that many
scrapers cost as much as one. Whatever is away, the page is there before Prometheus gives up
(10 s), and says what is away: it waits neither for a part that hangs nor for a free thread.
Numbers that a slow Postgres gave too late for one scrape are in the next; whether it is there at
all is asked apart from them.
"""

import asyncio
import hmac
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait

import psycopg
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from psycopg.errors import QueryCanceled

from app.catalog.queue_state import FRESH_SECONDS, queue_states
from app.errors import NotFoundError
from app.health import ask_parts, part_questions
from app.jobs.workers import failed_proofs
from app.kit.db import Conn, Database, session_settings
from app.kit.openapi import STRING, answer, documented
from app.kit.question import Question
from app.kit.traffic import Traffic
from app.settings import Settings

log = logging.getLogger(__name__)
router = APIRouter(tags=["health"])

KEPT_SECONDS = 5.0
STATEMENT_SECONDS = 3
PARTS_SECONDS = 5.0  # of all parts together
LATE_SECONDS = 60.0  # so long numbers are told that came too late for their scrape
WORKER_STATES = ("starting", "ready", "draining", "silent")


@router.get(
    "/metrics",
    **documented({200: answer("Metrics as text.", STRING, media="text/plain")}),
)
async def get_metrics(request: Request) -> Response:
    """Answer with every metric of this process and of the service.

    With TILLER_METRICS_TOKEN set it must be sent as a Bearer token; without, only this machine
    may ask. To everybody else the page does not exist.
    """
    settings: Settings = request.app.state.settings
    if not _may_read(request, settings):
        msg = f"There is no GET {request.url.path}. GET /openapi.json lists all routes."
        raise NotFoundError(msg)
    page: Question[bytes] = request.app.state.metrics
    return Response(await asyncio.wrap_future(page.begin()), media_type=CONTENT_TYPE_LATEST)


def prepare_metrics(app: FastAPI) -> Traffic:
    """Give an API its registry; what is read from Postgres is read once the API has started."""
    registry = CollectorRegistry()
    app.state.metrics = Question(lambda: generate_latest(registry), name="metrics")
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(_Service(app))
    return Traffic(registry)


def _may_read(request: Request, settings: Settings) -> bool:
    if settings.metrics_token is not None:
        sent = request.headers.get("authorization", "")
        wanted = f"Bearer {settings.metrics_token.get_secret_value()}"
        return hmac.compare_digest(sent.encode(), wanted.encode())
    try:
        return ipaddress.ip_address(request.client.host if request.client else "").is_loopback
    except ValueError:
        return False


class _Service(Collector):
    """Asks the parts how the service is, at most once in KEPT_SECONDS."""

    def __init__(self, app: FastAPI) -> None:
        def numbers() -> list[Metric]:
            database: Database = app.state.database
            return database.run(read_service, attempts=1)

        settings: Settings = app.state.settings
        self._parts = part_questions(app, lambda: _answers(settings.database_url))
        self._numbers = Question(numbers, name="ask-numbers")
        self._lock = threading.Lock()
        self._kept: list[Metric] = []
        self._asked_at = float("-inf")

    def describe(self) -> Iterable[Metric]:
        """Name nothing: registering must not ask a database that is not there yet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Give the service's metrics."""
        with self._lock:
            if time.monotonic() - self._asked_at >= KEPT_SECONDS:
                self._kept = list(self._ask())
                self._asked_at = time.monotonic()
            return self._kept

    def _ask(self) -> Iterator[Metric]:
        until = time.monotonic() + PARTS_SECONDS
        reading = self._numbers.begin()
        found = ask_parts(self._parts, PARTS_SECONDS)
        wait([reading], max(0.0, until - time.monotonic()))
        in_time = reading.done() and reading.exception() is None
        found["postgres"] = found["postgres"] or in_time
        up = GaugeMetricFamily("tiller_part_up", "1 when the part answers.", labels=["part"])
        for part, answered in found.items():
            up.add_metric([part], float(bool(answered)))
        yield up
        numbers = self._numbers.latest(LATE_SECONDS) if found["postgres"] else None
        if found["postgres"] and not in_time:
            error = reading.exception() if reading.done() else TimeoutError()
            log.warning("numbers late", extra={"error": repr(error), "older": numbers is not None})
        if numbers is not None:
            age, metrics = numbers
            yield GaugeMetricFamily(
                "tiller_numbers_age_seconds",
                "How long ago Postgres gave what is told of the service.",
                value=age,
            )
            yield from metrics


def _answers(database_url: str) -> bool:
    """Ask Postgres for nothing, on a new connection: those of the pool may all be busy."""
    with psycopg.connect(database_url, **session_settings()) as conn:
        conn.execute("SELECT 1")
    return True


def read_service(conn: Conn) -> list[Metric]:
    """Read every metric that comes from Postgres, on one connection; what takes long is left out.

    So one slow statement does not take the numbers of all the others away.
    """
    conn.execute("SELECT set_config('statement_timeout', %s, true)", [f"{STATEMENT_SECONDS}s"])
    readers = (_jobs, _queues, _workers, _tokens, _completions, _leases, _reconciler, _database)
    return [metric for reader in readers for metric in _in_time(reader, conn)]


def _in_time(reader: Callable[[Conn], Iterator[Metric]], conn: Conn) -> list[Metric]:
    try:
        with conn.transaction():
            return list(reader(conn))
    except QueryCanceled:
        log.warning("numbers left out: Postgres was too slow", extra={"which": reader.__name__})
        return []


def _jobs(conn: Conn) -> Iterator[Metric]:
    states = GaugeMetricFamily("tiller_jobs", "Jobs by state.", labels=["state"])
    for row in conn.execute("SELECT state, count(*) AS jobs FROM jobs GROUP BY state"):
        states.add_metric([row["state"]], row["jobs"])
    yield states
    yield from _numbers(
        conn.execute(
            """
            SELECT coalesce(sum(n_total - n_succeeded - n_errored - n_cancelled - n_expired), 0)
                    ::bigint AS requests_open,
                coalesce(sum(tokens_held), 0)::bigint AS job_tokens_held,
                coalesce(max(extract(epoch FROM now() - ended_running_at)) FILTER (
                    WHERE n_succeeded + n_errored + n_cancelled + n_expired = n_total), 0)::float8
                    AS finishing_oldest_seconds
            FROM jobs WHERE finished_at IS NULL
            """
        ).fetchone(),
        requests_open="Requests of unfinished Jobs that have not ended: each has an open Hold.",
        job_tokens_held="Tokens held by unfinished Jobs.",
        finishing_oldest_seconds="Longest wait of a Job whose requests have all ended.",
    )


def _queues(conn: Conn) -> Iterator[Metric]:
    names = {
        "requests_pending": "Requests of live Jobs that wait for a worker.",
        "requests_running": "Requests of live Jobs in leased shards.",
        "jobs_live": "Jobs that are queued or in progress.",
        "oldest_job_seconds": "Age of the oldest Job that is queued or in progress.",
        "tokens_per_second": "Tokens a second that the model's workers report, added up.",
    }
    families = {
        name: GaugeMetricFamily(f"tiller_queue_{name}", text, labels=["model"])
        for name, text in names.items()
    }
    for model, queue in queue_states(conn).items():
        for name, family in families.items():
            family.add_metric([model], getattr(queue, name) or 0)
    yield from families.values()


def _workers(conn: Conn) -> Iterator[Metric]:
    count = GaugeMetricFamily("tiller_workers", "Workers by state.", labels=["model", "state"])
    names = {
        "heartbeat_age_seconds": "Longest silence of a worker that is not gone.",
        "rss_bytes": "Largest resident memory of a worker.",
        "canary_age_seconds": "Longest time since a worker last proved that it steers.",
        "canary_failed": "Workers that could not show that they steer, gone ones too, within a "
        "day; none once a worker of the model that started later has.",
    }
    families = {
        name: GaugeMetricFamily(f"tiller_worker_{name}", text, labels=["model"])
        for name, text in names.items()
    }
    rows = conn.execute(
        """
        SELECT model,
            count(*) FILTER (WHERE state = 'starting' AND NOT is_silent) AS starting,
            count(*) FILTER (WHERE state = 'ready' AND NOT is_silent) AS ready,
            count(*) FILTER (WHERE state = 'draining' AND NOT is_silent) AS draining,
            count(*) FILTER (WHERE state <> 'gone' AND is_silent) AS silent,
            max(extract(epoch FROM now() - heartbeat_at)) FILTER (WHERE state <> 'gone')::float8
                AS heartbeat_age_seconds,
            max(rss_bytes) FILTER (WHERE state <> 'gone') AS rss_bytes,
            max(extract(epoch FROM now() - last_canary_at)) FILTER (WHERE state <> 'gone')::float8
                AS canary_age_seconds
        FROM (
            SELECT *, heartbeat_at < now() - make_interval(secs => %s) AS is_silent FROM workers
            WHERE heartbeat_at > now() - interval '1 day'
        ) AS lately GROUP BY model
        """,
        [FRESH_SECONDS],
    ).fetchall()
    failed = {proof.model: proof.workers for proof in failed_proofs(conn)}
    for row in rows:
        row["canary_failed"] = failed.get(row["model"], 0)
        for state in WORKER_STATES:
            count.add_metric([row["model"], state], row[state])
        for name, family in families.items():
            if row[name] is not None:
                family.add_metric([row["model"]], row[name])
    yield count
    yield from families.values()


def _tokens(conn: Conn) -> Iterator[Metric]:
    row = conn.execute(
        """
        SELECT balance, held, granted, granted - balance AS charged FROM (
            SELECT coalesce(sum(balance), 0)::bigint AS balance,
                coalesce(sum(held), 0)::bigint AS held FROM accounts
        ) AS accounts, (
            SELECT coalesce(sum(CASE kind WHEN 'grant' THEN amount ELSE -amount END), 0)::bigint
                AS granted FROM entries WHERE kind IN ('grant', 'reversal')
        ) AS grants
        """
    ).fetchone()
    assert row is not None
    yield CounterMetricFamily(
        "tiller_tokens_charged", "Tokens charged: grants less balances.", value=row["charged"]
    )
    yield from _numbers(
        {f"tokens_{name}": row[name] for name in ("granted", "balance", "held")},
        tokens_granted="Tokens granted, less reversals.",
        tokens_balance="Sum of all balances, held tokens included.",
        tokens_held="Tokens held for requests that have not ended.",
    )
    yield _accounts_stopped(conn)


def _accounts_stopped(conn: Conn) -> Metric:
    """Tell what a person has stopped from what was stopped because the ledger is wrong.

    What an operator does is in the audit log, written in the act's own transaction: at its time.
    """
    count = GaugeMetricFamily(
        "tiller_accounts_stopped",
        "Accounts that get no new Holds: their ledger does not add up, or a person stopped them.",
        labels=["by"],
    )
    row = conn.execute(
        """
        SELECT count(*) FILTER (WHERE by_person) AS person,
            count(*) FILTER (WHERE NOT by_person) AS ledger
        FROM (
            SELECT EXISTS (
                SELECT 1 FROM audit_log
                WHERE target = 'acct_' || replace(accounts.id::text, '-', '')
                    AND action = 'holds.stop' AND at = holds_stopped_at) AS by_person
            FROM accounts WHERE holds_stopped_at IS NOT NULL
        ) AS stopped
        """
    ).fetchone()
    assert row is not None
    for by, accounts in row.items():
        count.add_metric([by], accounts)
    return count


def _completions(conn: Conn) -> Iterator[Metric]:
    count = GaugeMetricFamily(
        "tiller_completions_open", "Completions that have not ended.", labels=["model", "state"]
    )
    overdue = 0.0
    rows = conn.execute(
        """
        SELECT model, state, count(*) AS completions,
            max(extract(epoch FROM now() - deadline))::float8 AS overdue
        FROM completions WHERE finished_at IS NULL GROUP BY model, state
        """
    )
    for row in rows:
        count.add_metric([row["model"], row["state"]], row["completions"])
        overdue = max(overdue, row["overdue"])
    yield count
    yield GaugeMetricFamily(
        "tiller_completions_overdue_seconds",
        "How far an unended Completion is past its deadline, at most.",
        value=overdue,
    )


def _leases(conn: Conn) -> Iterator[Metric]:
    return _numbers(
        conn.execute(
            """
            SELECT count(*) AS shards_leased,
                coalesce(max(extract(epoch FROM now() - lease_expires_at)) FILTER (
                    WHERE lease_expires_at < now()), 0)::float8 AS lease_overdue_seconds
            FROM shards WHERE state = 'leased'
            """
        ).fetchone(),
        shards_leased="Shards that workers hold now.",
        lease_overdue_seconds="How long ago a lease ran out that nobody ended yet, at most.",
    )


def _reconciler(conn: Conn) -> Iterator[Metric]:
    """Tell when the reconciler was last at work: it takes a sample in every round."""
    row = conn.execute(
        "SELECT extract(epoch FROM now() - max(at))::float8 AS age FROM samples"
    ).fetchone()
    if row is not None and row["age"] is not None:
        yield GaugeMetricFamily(
            "tiller_reconciler_idle_seconds",
            "Time since the last full round of a reconciler.",
            value=row["age"],
        )
    broken = GaugeMetricFamily(
        "tiller_invariant_violations",
        "Violations of each rule in the last run of the invariants.",
        labels=["rule"],
    )
    run = conn.execute(
        """
        SELECT rules, extract(epoch FROM now() - finished_at)::float8 AS age
        FROM invariant_runs ORDER BY id DESC LIMIT 1
        """
    ).fetchone()
    if run is None:
        return
    for rule in run["rules"]:
        broken.add_metric([rule["name"]], rule["violations_found"])
    yield broken
    yield from _numbers(
        {
            "invariants_age_seconds": run["age"],
            "invariants_unfinished": sum(r["outcome"] == "unfinished" for r in run["rules"]),
        },
        invariants_age_seconds="Time since the last run of the invariants.",
        invariants_unfinished="Rules that the last run had no time for.",
    )


def _database(conn: Conn) -> Iterator[Metric]:
    return _numbers(
        conn.execute(
            """
            SELECT pg_database_size(current_database()) AS database_bytes,
                (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')
                    AS database_connections,
                current_setting('max_connections')::integer AS database_connections_max
            """
        ).fetchone(),
        database_bytes="Size of the database on disk.",
        database_connections="Open connections to Postgres, of everybody.",
        database_connections_max="Connections that Postgres allows.",
    )


def _numbers(row: dict[str, float] | None, **texts: str) -> Iterator[Metric]:
    assert row is not None
    for name, text in texts.items():
        yield GaugeMetricFamily(f"tiller_{name}", text, value=row[name])
