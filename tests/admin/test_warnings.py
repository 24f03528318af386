"""What the overview warns of: workers that fell silent, proofs of steering that failed."""

import pytest

from app.jobs.records import WorkerIdentity
from app.jobs.workers import SILENT_SECONDS_MAX, worker_gone, worker_proved
from app.reconcile.steps import mark_dead_workers
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders

SILENT, FAILED = "Workers are silent", "A check of steering failed"


def warnings(dashboard: Dashboard) -> set[str]:
    """Name the warnings of this test that the overview shows."""
    page = dashboard.browser("read-only").get("/admin").text
    return {title for title in (SILENT, FAILED) if title in page}


def a_worker(dashboard: Dashboard, **fields: object) -> WorkerIdentity:
    """Start a worker."""
    return Builders(dashboard.database).a_worker(**fields)


def prove(dashboard: Dashboard, worker: WorkerIdentity, outcome: str, *, leaves: bool) -> None:
    """Let a worker prove, and end as one that failed does."""
    with dashboard.database.transaction() as conn:
        worker_proved(conn, worker.worker_id, outcome)
        if leaves:
            worker_gone(conn, worker.worker_id)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(1, set()), (20, {SILENT}), (61, {SILENT}), (200, {SILENT}), (280, {SILENT})],
)
def test_a_silent_worker_is_shown_until_it_counts_as_gone(
    dashboard: Dashboard, seconds: int, shown: set[str]
) -> None:
    worker = a_worker(dashboard)
    with dashboard.database.transaction() as conn:
        conn.execute(
            "UPDATE workers SET heartbeat_at = now() - make_interval(secs => %s) WHERE id = %s",
            [seconds, worker.worker_id],
        )
    mark_dead_workers(dashboard.database)
    assert warnings(dashboard) == shown


def test_a_worker_that_counts_as_gone_is_no_warning(dashboard: Dashboard) -> None:
    a_worker(dashboard)
    with dashboard.database.transaction() as conn:
        conn.execute(
            "UPDATE workers SET heartbeat_at = now() - make_interval(secs => %s)",
            [SILENT_SECONDS_MAX + 5],
        )
    assert mark_dead_workers(dashboard.database) == 1
    assert warnings(dashboard) == set()


@pytest.mark.parametrize("leaves", [True, False], ids=["gone", "still there"])
def test_a_failed_proof_is_shown_whether_its_worker_is_there_or_gone(
    dashboard: Dashboard, *, leaves: bool
) -> None:
    worker = a_worker(dashboard, host="the-cold-host")
    prove(dashboard, worker, "failed", leaves=leaves)
    assert warnings(dashboard) == {FAILED}
    page = dashboard.browser("read-only").get("/admin").text
    assert "the-cold-host (tiny): failed" in page


def test_a_failed_proof_is_answered_only_by_a_later_worker_of_its_model(
    dashboard: Dashboard,
) -> None:
    older = a_worker(dashboard)
    failed = a_worker(dashboard)
    prove(dashboard, failed, "failed", leaves=True)
    prove(dashboard, older, "passed", leaves=False)
    prove(dashboard, a_worker(dashboard, model="another"), "passed", leaves=False)
    assert warnings(dashboard) == {FAILED}
    prove(dashboard, a_worker(dashboard), "passed", leaves=False)
    assert warnings(dashboard) == set()
    prove(dashboard, a_worker(dashboard), "failed", leaves=True)
    assert warnings(dashboard) == {FAILED}


def test_a_failed_proof_of_yesterday_is_no_warning(dashboard: Dashboard) -> None:
    prove(dashboard, a_worker(dashboard), "failed", leaves=True)
    with dashboard.database.transaction() as conn:
        conn.execute(
            """
            UPDATE workers SET heartbeat_at = now() - interval '25 hours',
                last_canary_at = now() - interval '25 hours'
            """
        )
    assert warnings(dashboard) == set()


def test_many_failures_are_counted_in_one_warning(dashboard: Dashboard) -> None:
    for model in ("a", "a", "b"):
        prove(dashboard, a_worker(dashboard, model=model), "failed", leaves=True)
    assert "and 2 more" in dashboard.browser("read-only").get("/admin").text
