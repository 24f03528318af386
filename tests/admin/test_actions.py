"""Acts on Jobs and workers: counted first, then one by one, each with its row in the log."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from app.admin.access import Operator
from app.admin.actions import (
    JobFilter,
    cancel_job,
    cancel_jobs,
    drain_worker,
    undrain_worker,
)
from app.errors import ConflictError, NotFoundError
from app.jobs.records import WorkerStats
from app.jobs.states import JobState
from app.jobs.workers import worker_gone, worker_heartbeat
from app.kit.ids import new_uuid, public_id
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders

OPERATOR = Operator(new_uuid(), new_uuid(), "olga", "operator")


@pytest.fixture
def here(dashboard: Dashboard) -> Builders:
    return Builders(dashboard.database)


def states(here: Builders, jobs: list[UUID]) -> list[JobState]:
    return [here.job(job_id).state for job_id in jobs]


def test_a_job_is_cancelled_and_written_down_with_before_and_after(
    dashboard: Dashboard, here: Builders
):
    job = here.a_job(requests=3)
    with dashboard.database.transaction() as conn:
        assert cancel_job(conn, OPERATOR, job.id) is True
    assert here.job(job.id).state == "cancelling"
    (entry,) = dashboard.audit("job.cancel")
    assert (entry.target, entry.name) == (public_id("job", job.id), "olga")
    assert entry.before == {"state": "queued", "tokens_held": 27}
    assert entry.after == {"state": "cancelling", "tokens_held": 0, "requests_cancelled": 3}
    with dashboard.database.transaction() as conn:
        assert cancel_job(conn, OPERATOR, job.id) is False
    assert len(dashboard.audit("job.cancel")) == 1


def test_a_job_that_does_not_exist_is_not_cancelled(dashboard: Dashboard):
    with dashboard.database.transaction() as conn, pytest.raises(NotFoundError):
        cancel_job(conn, OPERATOR, new_uuid())
    assert dashboard.audit() == []


def test_an_act_that_is_rolled_back_is_not_written_down(dashboard: Dashboard, here: Builders):
    job = here.a_job()
    with dashboard.database.transaction() as conn:
        cancel_job(conn, OPERATOR, job.id)
        conn.rollback()
    assert here.job(job.id).state == "queued"
    assert dashboard.audit() == []


def test_a_dry_run_counts_and_changes_nothing(dashboard: Dashboard, here: Builders):
    jobs = [here.a_job(requests=3).id for _ in range(4)]
    dry = cancel_jobs(dashboard.database, OPERATOR, JobFilter(), dry_run=True)
    assert (dry.jobs, dry.requests, dry.more) == (4, 12, False)
    assert states(here, jobs) == ["queued"] * 4
    assert dashboard.audit() == []


def test_what_was_counted_is_cancelled_and_what_came_later_is_not(
    dashboard: Dashboard, here: Builders
):
    early = [here.a_job(requests=2).id for _ in range(3)]
    dry = cancel_jobs(dashboard.database, OPERATOR, JobFilter(model="tiny"), dry_run=True)
    late = here.a_job().id
    done = cancel_jobs(dashboard.database, OPERATOR, dry.filter, dry_run=False)
    assert (done.jobs, done.requests) == (3, 6)
    assert states(here, early) == ["cancelling"] * 3
    assert here.job(late).state == "queued"
    assert len(dashboard.audit("job.cancel")) == 3
    (whole,) = dashboard.audit("jobs.cancel")
    assert whole.after == {"jobs": 3, "requests": 6, "more": False}
    assert whole.before is not None
    assert whole.before["model"] == "tiny"
    again = cancel_jobs(dashboard.database, OPERATOR, dry.filter, dry_run=False)
    assert again.jobs == 0


def test_every_field_of_a_filter_narrows_it(dashboard: Dashboard, here: Builders):
    account_id = here.an_account()
    mine = here.a_job(account_id=account_id)
    here.a_job(model="other")
    paused = here.a_job()
    with dashboard.database.transaction() as conn:
        conn.execute("UPDATE jobs SET state = 'paused' WHERE id = %s", [paused.id])
        conn.execute("UPDATE jobs SET name = 'The Sweep' WHERE id = %s", [paused.id])
        conn.execute(
            "UPDATE jobs SET created_at = created_at - interval '2 days' WHERE id = %s", [mine.id]
        )

    def count(**fields: object) -> int:
        chosen = JobFilter(**fields)  # type: ignore[arg-type]
        return cancel_jobs(dashboard.database, OPERATOR, chosen, dry_run=True).jobs

    yesterday = datetime.now(UTC) - timedelta(days=1)
    assert count() == 3
    assert count(account_id=account_id) == 1
    assert count(model="other") == 1
    assert count(state=JobState.paused) == 1
    assert count(state=JobState.completed) == 0
    assert count(name="sweep") == 1
    assert count(name="%") == 0
    assert count(since=yesterday) == 2
    assert count(until=yesterday) == 1
    assert count(account_id=account_id, model="other") == 0


def test_one_act_cancels_so_many_jobs_and_says_that_others_are_left(
    dashboard: Dashboard, here: Builders
):
    jobs = [here.a_job(requests=1).id for _ in range(5)]
    dry = cancel_jobs(dashboard.database, OPERATOR, JobFilter(), dry_run=True, jobs_max=3)
    assert (dry.jobs, dry.more) == (3, True)
    done = cancel_jobs(dashboard.database, OPERATOR, dry.filter, dry_run=False, jobs_max=3)
    assert (done.jobs, done.more) == (3, True)
    assert states(here, jobs) == ["cancelling"] * 3 + ["queued"] * 2


def test_a_worker_is_drained_and_the_wish_taken_back(dashboard: Dashboard, here: Builders):
    worker = here.a_worker()

    def act(what) -> bool:
        with dashboard.database.transaction() as conn:
            return what(conn, OPERATOR, worker.worker_id)

    wish = "SELECT drain_requested FROM workers WHERE id = %s"
    assert act(drain_worker) is True
    assert dashboard.number(wish, worker.worker_id) is True
    assert act(drain_worker) is False
    assert act(undrain_worker) is True
    assert act(undrain_worker) is False
    assert dashboard.number(wish, worker.worker_id) is False
    back, there = dashboard.audit()
    assert (there.action, back.action) == ("worker.drain", "worker.undrain")
    assert there.target == public_id("worker", worker.worker_id)
    assert there.before == back.after == {"drain_requested": False}
    assert there.after == back.before == {"drain_requested": True}
    with dashboard.database.transaction() as conn:
        worker_gone(conn, worker.worker_id)
    with pytest.raises(NotFoundError):
        act(drain_worker)


def test_a_worker_that_has_heard_of_its_drain_cannot_be_kept(dashboard: Dashboard, here: Builders):
    worker = here.a_worker()
    path = f"/admin/workers/{public_id('worker', worker.worker_id)}"
    browser = dashboard.browser("operator")
    browser.post(f"{path}/drain")
    assert f"{path}/undrain" in browser.get("/admin/workers").text
    with dashboard.database.transaction() as conn:
        assert worker_heartbeat(conn, worker.worker_id, WorkerStats()).drain
    assert f"{path}/undrain" not in browser.get("/admin/workers").text
    refused = browser.post(f"{path}/undrain")
    assert refused.status_code == 409
    assert "has begun to drain and will end" in refused.text
    with dashboard.database.transaction() as conn, pytest.raises(ConflictError):
        undrain_worker(conn, OPERATOR, worker.worker_id)
    with dashboard.database.transaction() as conn:
        assert worker_heartbeat(conn, worker.worker_id, WorkerStats()).drain
    state = "SELECT state FROM workers WHERE id = %s"
    assert dashboard.number(state, worker.worker_id) == "draining"
    assert dashboard.audit("worker.undrain") == []
