"""A Job that was cancelled or expired does not look like one that succeeded."""

import re

from app.jobs.claims import finish_shard
from app.jobs.lifecycle import cancel_job
from app.jobs.records import Job
from app.kit.ids import public_id
from app.reconcile.steps import expire_jobs
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders, cancelled, succeeded
from tests.fixtures.parts import named_part

CELLS = re.compile(r'<li class="(\w+)" title="Requests (\d+) to (\d+): ([^"]+?)(?:, attempt 2)?"')


def cells(dashboard: Dashboard, job: Job) -> list[tuple[str, str]]:
    text = dashboard.browser("read-only").get(f"/admin/jobs/{public_id('job', job.id)}").text
    return [(kind, says) for kind, _, _, says in CELLS.findall(text)]


def test_a_cancelled_job_shows_what_succeeded_and_which_shards_were_stopped(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    job = builders.a_job(requests=16, shard_size=4)
    worker = builders.a_worker()
    first = builders.a_lease(worker)
    with dashboard.database.transaction() as conn:
        assert finish_shard(conn, first, succeeded(range(4)), named_part(first))
    second = builders.a_lease(worker)
    with dashboard.database.transaction() as conn:
        cancel_job(conn, job.id)
        results = [*succeeded([4]), *cancelled([5, 6, 7])]
        assert finish_shard(conn, second, results, named_part(second))
    assert cells(dashboard, job) == [
        ("good", "done"),
        *[("calm", "cancelled, all or in part")] * 3,
    ]
    with dashboard.database.transaction() as conn:
        conn.execute(
            """
            UPDATE jobs SET state = 'cancelled', ended_running_at = now(), finished_at = now()
            WHERE id = %s
            """,
            [job.id],
        )
    browser = dashboard.browser("read-only")
    text = browser.get(f"/admin/jobs/{public_id('job', job.id)}").text
    assert '<span class="big">31.2 %</span>' in text
    assert "succeeded: 5 of 16 requests" in text
    assert "5 of 16 succeeded" in browser.get("/admin/jobs").text


def test_shards_of_a_job_whose_time_was_over_are_drawn_as_expired(dashboard: Dashboard):
    job = Builders(dashboard.database).a_job(requests=8, shard_size=4, expires_in_seconds=-1.0)
    assert expire_jobs(dashboard.database) == 1
    assert cells(dashboard, job) == [("warn", "expired, all or in part")] * 2


def test_a_job_that_runs_counts_what_ended(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    job = builders.a_job(requests=8, shard_size=4)
    first = builders.a_lease()
    with dashboard.database.transaction() as conn:
        assert finish_shard(conn, first, succeeded(range(4)), named_part(first))
    text = dashboard.browser("read-only").get(f"/admin/jobs/{public_id('job', job.id)}").text
    assert '<span class="big">50.0 %</span>' in text
    assert "ended: 4 of 8 requests" in text
    assert cells(dashboard, job) == [("good", "done"), ("still", "waiting")]


def test_a_job_waits_only_while_nothing_of_it_runs(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    job = builders.a_job(requests=12, shard_size=4)
    with dashboard.database.transaction() as conn:
        conn.execute(
            "UPDATE jobs SET created_at = now() - interval '3 hours' WHERE id = %s", [job.id]
        )
    browser = dashboard.browser("read-only")

    def longest_wait() -> str:
        text = browser.get("/admin").text
        (found,) = re.findall(r'Longest wait</dt>\s*<dd class="value">([^<]*)</dd>', text)
        return str(found)

    assert longest_wait() == "3 h"
    worker = builders.a_worker()
    shard = builders.a_lease(worker)
    assert longest_wait() == "none"
    assert "every Job is served" in browser.get("/admin").text
    with dashboard.database.transaction() as conn:
        assert finish_shard(conn, shard, succeeded(range(4)), named_part(shard))
        conn.execute(
            """
            UPDATE shards SET finished_at = now() - interval '2 minutes 1 second'
            WHERE id = %s
            """,
            [shard.id],
        )
        conn.execute(
            "UPDATE jobs SET started_at = now() - interval '1 hour' WHERE id = %s", [job.id]
        )
    assert longest_wait().startswith("2 min")
