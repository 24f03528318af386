"""Counts that stand beside each other add up, or say how they differ."""

import re

from app.jobs.claims import finish_shard
from app.jobs.lifecycle import cancel_job
from app.kit.ids import public_id
from app.reconcile.steps import expire_jobs
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders, errored, succeeded
from tests.fixtures.parts import named_part

COUNT = re.compile(r"(\d+) ([a-z]+)")


def counts(dashboard: Dashboard, name: str) -> dict[str, int]:
    """Read what the list of requests says of all of them; `in` is how many there are."""
    text = dashboard.browser("read-only").get(f"/admin/jobs/{name}/requests").text
    (line,) = re.findall(r"<p class=\"lead\">(.* in this Job: .*)</p>", text)
    return {word: int(number) for number, word in COUNT.findall(line)}


def test_the_counts_of_a_cancelled_jobs_requests_add_up(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    job = builders.a_job(requests=100, shard_size=10)
    shard = builders.a_lease()
    with dashboard.database.transaction() as conn:
        results = [*succeeded(range(8)), *errored([8, 9])]
        assert finish_shard(conn, shard, results, named_part(shard))
    name = public_id("job", job.id)
    usual = {"in": 100, "succeeded": 8, "errored": 2, "running": 0}
    assert counts(dashboard, name) == {**usual, "waiting": 90}
    with dashboard.database.transaction() as conn:
        cancel_job(conn, job.id)
    assert counts(dashboard, name) == {**usual, "waiting": 0, "cancelled": 90}


def test_the_counts_of_requests_whose_time_was_over_add_up(dashboard: Dashboard):
    job = Builders(dashboard.database).a_job(requests=8, shard_size=4, expires_in_seconds=-1.0)
    assert expire_jobs(dashboard.database) == 1
    ended = {"succeeded": 0, "errored": 0, "running": 0, "waiting": 0, "expired": 8}
    assert counts(dashboard, public_id("job", job.id)) == {"in": 8, **ended}


def test_requests_that_run_and_those_in_an_engine_are_told_apart(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    builders.a_job(requests=8, shard_size=8)
    builders.a_lease()
    browser = dashboard.browser("read-only")
    overview = browser.get("/admin").text
    assert "8 running, in leased shards" in overview
    for text in (overview, browser.get("/admin/workers").text):
        (why,) = re.findall(r'<th [^>]*title="([^"]+)">In the engine</th>', text)
        assert "counts as running from the lease of its shard on" in why
        assert 'data-label="In the engine"' in text
