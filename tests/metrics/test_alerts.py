"""Every alert fires in the state that it is for, and in no other.

States are rows of a real service, scraped through /metrics; Prometheus' part is played by
promql.py, which knows how long each rule waits.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from app.jobs.records import WorkerIdentity
from app.jobs.workers import worker_gone, worker_proved
from app.kit.ids import new_uuid, public_id
from app.main import create_app
from app.reconcile.steps import audit, mark_dead_workers
from tests.admin.people import dashboard, running_dashboard
from tests.fixtures.api import settings_for
from tests.fixtures.away import store_away
from tests.metrics.promql import Samples, Scrape
from tests.metrics.watched import (
    EVERY_SECONDS,
    LONG_SECONDS,
    Watched,
    alarms,
    rules,
    samples_of,
    steady,
    watched,
)
from tests.rules.source_tree import ROOT

__all__ = ["dashboard", "running_dashboard", "store_away", "watched"]

# What also fires when this state lasts, because it is true as well.
ALSO = {
    "TillerApiDown": {"TillerReconcilerIdle"},
    "TillerPostgresDown": {"TillerReconcilerIdle"},
}


def test_every_rule_is_explained_with_what_to_do() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| (Tiller\w+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert [name for name, _, _ in explained] == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")


def test_every_metric_of_a_rule_is_served(watched: Watched) -> None:
    watched.samples()  # the first answer is counted once it was given
    served = {name for name, _ in watched.samples()}
    for rule in rules():
        used = set(re.findall(r"\btiller_\w+", rule["expr"]))
        assert used <= served, f"{rule['alert']}: {used - served}"


def test_a_service_that_is_well_raises_nothing(watched: Watched) -> None:
    assert watched.alarms() == set()


# --- states that last, each a change of a service that is well --------------------------------


def reconciler_slept(watched: Watched) -> None:
    watched.execute("UPDATE samples SET at = at - interval '10 minutes'")


def reconciler_never_ran(watched: Watched) -> None:
    watched.execute("DELETE FROM samples")


def balance_is_wrong(watched: Watched) -> None:
    watched.execute("UPDATE accounts SET balance = balance + 1")
    audit(watched.database)


def held_is_wrong(watched: Watched) -> None:
    watched.execute("UPDATE accounts SET held = held + 1 WHERE held > 0")
    audit(watched.database)


def held_is_wrong_and_the_account_was_stopped_before(watched: Watched) -> None:
    stop_deliberately(watched)
    held_is_wrong(watched)


def held_was_wrong(watched: Watched) -> None:
    held_is_wrong(watched)
    watched.execute("UPDATE accounts SET held = held - 1 WHERE held > 0")
    audit(watched.database)


def a_shard_is_impossible(watched: Watched) -> None:
    watched.execute("UPDATE shards SET deaths_alone = engine_deaths + 1")
    audit(watched.database)


def invariants_are_old(watched: Watched) -> None:
    watched.execute("UPDATE invariant_runs SET finished_at = finished_at - interval '4 hours'")


def invariants_had_no_time(watched: Watched) -> None:
    watched.execute(
        "UPDATE invariant_runs SET rules = jsonb_set(rules, '{0,outcome}', '\"unfinished\"')"
    )


def the_worker_left(watched: Watched) -> None:
    watched.run(lambda conn: worker_gone(conn, watched.worker.worker_id))


def the_job_is_old(watched: Watched) -> None:
    watched.execute("UPDATE jobs SET created_at = created_at - interval '7 hours'")


def a_worker_failed_at_its_start(watched: Watched) -> None:
    fail_and_leave(watched, a_worker_of(watched))


def a_worker_failed_after_an_hour(watched: Watched) -> None:
    worker = a_worker_of(watched)
    watched.run(lambda conn: worker_proved(conn, worker.worker_id, "passed"))
    fail_and_leave(watched, worker)


def a_worker_failed_and_an_older_one_still_passes(watched: Watched) -> None:
    a_worker_failed_at_its_start(watched)
    watched.run(lambda conn: worker_proved(conn, watched.worker.worker_id, "passed"))


def a_worker_failed_and_one_of_another_model_passed(watched: Watched) -> None:
    a_worker_failed_at_its_start(watched)
    pass_later(watched, model="another")


def no_worker_tried_lately(watched: Watched) -> None:
    watched.execute("UPDATE workers SET last_canary_at = now() - interval '4 hours'")


def a_lease_ran_out(watched: Watched) -> None:
    watched.execute(
        """
        UPDATE shards SET state = 'leased', lease_token = 1, worker_id = gen_random_uuid(),
            leased_at = now(), lease_expires_at = now() - interval '90 seconds'
        """
    )


def a_job_does_not_finish(watched: Watched) -> None:
    watched.execute(
        """
        UPDATE jobs SET state = 'finalizing', n_succeeded = n_total,
            ended_running_at = now() - interval '20 minutes'
        """
    )


LASTING: list[tuple[str, Callable[[Watched], None]]] = [
    ("TillerReconcilerIdle", reconciler_slept),
    ("TillerReconcilerIdle", reconciler_never_ran),
    ("TillerLedgerBroken", balance_is_wrong),
    ("TillerLedgerBroken", held_is_wrong),
    ("TillerLedgerBroken", held_is_wrong_and_the_account_was_stopped_before),
    ("TillerLedgerBroken", held_was_wrong),
    ("TillerInvariantBroken", a_shard_is_impossible),
    ("TillerInvariantsNotRun", invariants_are_old),
    ("TillerInvariantsNotRun", invariants_had_no_time),
    ("TillerNoWorker", the_worker_left),
    ("TillerQueueOld", the_job_is_old),
    ("TillerSteeringNotProven", a_worker_failed_at_its_start),
    ("TillerSteeringNotProven", a_worker_failed_after_an_hour),
    ("TillerSteeringNotProven", a_worker_failed_and_an_older_one_still_passes),
    ("TillerSteeringNotProven", a_worker_failed_and_one_of_another_model_passed),
    ("TillerSteeringNotProven", no_worker_tried_lately),
    ("TillerLeaseOverdue", a_lease_ran_out),
    ("TillerJobDoesNotFinish", a_job_does_not_finish),
]


@pytest.mark.parametrize(
    ("alert", "change"), LASTING, ids=[change.__name__ for _, change in LASTING]
)
def test_a_state_raises_its_alert_and_no_other(
    watched: Watched, alert: str, change: Callable[[Watched], None]
) -> None:
    change(watched)
    assert watched.alarms() == {alert}


# --- parts that are away -----------------------------------------------------------------------


def away(part: str, watched: Watched, folder: Path) -> Samples:
    """Scrape an API that does not reach one of its parts."""
    urls = {"database_url": watched.database.url, "redis_url": f"unix://{folder}/none.sock"}
    if part == "postgres":
        urls = {"database_url": "postgresql://nobody@127.0.0.1:1/none"}
        urls["redis_url"] = watched.dashboard.app.state.settings.redis_url
    (folder / part).mkdir()
    app = create_app(settings_for(folder / part, **urls))
    with TestClient(app):
        return samples_of(app)


def test_a_part_that_is_away_raises_its_alert(
    watched: Watched, tmp_path: Path, store_away, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {part: away(part, watched, tmp_path) for part in ("postgres", "redis")}
    parts = watched.dashboard.app.state._state  # the attributes themselves cannot be put back
    monkeypatch.setitem(parts, "store", store_away)
    seen["object_store"] = watched.samples()
    seen["api"] = {("up", frozenset({("job", "tiller")})): 0.0}
    names = {"postgres": "Postgres", "redis": "Redis", "object_store": "Store", "api": "Api"}
    for part, samples in seen.items():
        alert = f"Tiller{names[part]}Down"
        assert alarms(steady(samples)) == {alert} | ALSO.get(alert, set())


# --- states that move --------------------------------------------------------------------------


def falls_silent(watched: Watched, worker: WorkerIdentity, seconds: int) -> Iterator[Scrape]:
    """Scrape while a worker stays silent and the reconciler does its rounds."""
    for second in range(0, seconds, EVERY_SECONDS):
        watched.execute(
            """
            UPDATE workers SET heartbeat_at = now()
                - CASE WHEN id = %s THEN make_interval(secs => %s) ELSE interval '0' END
            """,
            *(worker.worker_id, second),
        )
        mark_dead_workers(watched.database)
        yield Scrape(second, watched.samples())


def test_a_worker_that_falls_silent_raises_its_alert_before_it_counts_as_gone(
    watched: Watched,
) -> None:
    other = a_worker_of(watched)
    assert watched.alarms_of(falls_silent(watched, other, 40)) == set()
    assert watched.alarms_of(falls_silent(watched, other, LONG_SECONDS)) == {"TillerWorkerSilent"}
    assert watched.alarms() == set(), "it is gone by now, and an alarm ends"


def test_the_only_worker_that_falls_silent_counts_as_none(watched: Watched) -> None:
    history = list(falls_silent(watched, watched.worker, LONG_SECONDS))
    assert watched.alarms_of(history) == {"TillerWorkerSilent", "TillerNoWorker"}
    first = next(
        scrape.at
        for count, scrape in enumerate(history)
        if "TillerNoWorker" in alarms(history[:count])
    )
    assert first <= 60 + 5 * 60 + 2 * EVERY_SECONDS, "as soon as nobody counts on it"


def asked(watched: Watched, path: str, *, each: int) -> Iterator[Scrape]:
    """Scrape every minute; in between, some requests for `path` among ten that succeed."""
    client = TestClient(watched.dashboard.app, raise_server_exceptions=False)
    key = {"authorization": f"Bearer {watched.dashboard.a_key(scopes={'jobs:read'})}"}
    for minute in range(20):
        for _ in range(10):
            assert client.get("/healthz").status_code == 200
        for _ in range(each):
            client.get(path, headers=key)
        yield Scrape(60 * minute, watched.samples())


def test_answers_that_are_faults_of_the_service_raise_an_alert(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        watched.alarms_of(asked(watched, f"/v1/jobs/{public_id('job', new_uuid())}", each=5))
        == set()
    )
    monkeypatch.setitem(watched.dashboard.app.state._state, "catalog", None)
    assert watched.alarms_of(asked(watched, "/v1/models", each=1)) == {"TillerErrors"}


@pytest.mark.parametrize(("used", "raised"), [(0.5, set()), (0.9, {"TillerConnectionsScarce"})])
def test_connections_that_run_out_raise_an_alert(
    watched: Watched, used: float, raised: set[str]
) -> None:
    samples = watched.samples()
    most = samples["tiller_database_connections_max", frozenset()]
    changed = {**samples, ("tiller_database_connections", frozenset()): used * most}
    assert alarms(steady(changed)) == raised


# --- states that look like one and are none ----------------------------------------------------


def test_a_proof_that_a_later_worker_gives_ends_the_alert(watched: Watched) -> None:
    a_worker_failed_after_an_hour(watched)
    pass_later(watched)
    assert watched.alarms() == set()
    fail_and_leave(watched, a_worker_of(watched))
    assert watched.alarms() == {"TillerSteeringNotProven"}, "the next failure rings again"


def test_an_account_that_a_person_stopped_raises_nothing(watched: Watched) -> None:
    stop_deliberately(watched)
    assert watched.samples()["tiller_accounts_stopped", frozenset({("by", "person")})] == 1
    assert watched.alarms() == set()


def a_worker_of(watched: Watched) -> WorkerIdentity:
    """Start another worker of the same model."""
    return watched.builders.a_worker()


def fail_and_leave(watched: Watched, worker: WorkerIdentity) -> None:
    """Fail a proof and end, as a worker does within a second."""
    watched.run(
        lambda conn: worker_proved(conn, worker.worker_id, "failed"),
        lambda conn: worker_gone(conn, worker.worker_id),
    )


def pass_later(watched: Watched, *, model: str = "tiny") -> None:
    """Start another worker, and let it pass."""
    worker = watched.builders.a_worker(model=model)
    watched.run(lambda conn: worker_proved(conn, worker.worker_id, "passed"))


def stop_deliberately(watched: Watched) -> None:
    """Stop the account on its page, for a reason that reads like that of the reconciler."""
    with watched.database.transaction() as conn:
        row = conn.execute("SELECT account_id FROM jobs").fetchone()
    assert row is not None
    account = public_id("acct", row["account_id"])
    browser = watched.dashboard.browser("operator")
    answer = browser.post(f"/admin/accounts/{account}/holds/stop", reason="L1: looks odd")
    assert answer.status_code == 303
