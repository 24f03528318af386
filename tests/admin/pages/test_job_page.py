"""The page of one Job and those beside it: what moves, what says that it stands still."""

import re

import pytest

from app.admin.filters import exact
from app.jobs.claims import finish_shard
from app.jobs.records import Job
from app.kit.ids import public_id
from tests.admin.pages import test_live
from tests.admin.pages.running import end_cancelled
from tests.admin.pages.test_live import events, next_event, person
from tests.admin.people import Dashboard
from tests.fixtures.builders import ENGINE, Builders, succeeded
from tests.fixtures.parts import named_part

address, quick = test_live.address, test_live.quick
STILL = re.compile(r'This page stands still; <a href="([^"]+)">the page of its Job is live</a>')


def path_of(job: Job) -> str:
    return f"/admin/jobs/{public_id('job', job.id)}"


def test_the_engine_of_a_job_is_named_as_soon_as_it_starts(dashboard: Dashboard, address, quick):
    builders = Builders(dashboard.database)
    job = builders.a_job(requests=5)
    with (
        person(dashboard, address) as client,
        client.stream("GET", f"/admin/live?page=job&job={public_id('job', job.id)}") as answer,
    ):
        assert 'sse-swap="about"' in client.get(path_of(job)).text
        stream = events(answer)
        assert "not started yet" in next_event(stream, "about")
        builders.a_lease()
        assert ENGINE in next_event(stream, "about")


def test_the_first_part_is_the_one_that_was_published_first(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    job = builders.a_job(requests=8, shard_size=4)
    worker = builders.a_worker()
    shards = [builders.a_lease(worker) for _ in range(2)]
    with dashboard.database.transaction() as conn:
        for shard in shards:
            indices = range(shard.first_index, shard.end_index)
            assert finish_shard(conn, shard, succeeded(indices), named_part(shard))
        conn.execute(
            """
            UPDATE parts SET published_at = published_at - interval '1 second' * first_index
            """
        )
    text = dashboard.browser("read-only").get(path_of(job)).text
    found = re.search(r'First part published</span> <time datetime="([^"]+)"', text)
    assert found is not None
    published = "SELECT published_at FROM parts WHERE first_index = %s"
    assert found[1] == exact(dashboard.number(published, 4))
    assert found[1] != exact(dashboard.number(published, 0))


@pytest.fixture
def running_job(dashboard: Dashboard) -> Job:
    """A Job whose first shard is done; the second waits."""
    builders = Builders(dashboard.database)
    job = builders.a_job(requests=8, shard_size=4)
    shard = builders.a_lease()
    with dashboard.database.transaction() as conn:
        assert finish_shard(conn, shard, succeeded(range(4)), named_part(shard))
    return job


@pytest.mark.parametrize("tail", ["/requests/7", "/files", "/files?after=x", "/samples"])
def test_a_page_beside_that_of_a_job_says_that_it_stands_still_while_the_job_runs(
    dashboard: Dashboard, running_job: Job, tail
):
    browser = dashboard.browser("read-only")
    text = browser.get(path_of(running_job) + tail).text
    where = STILL.search(text)
    assert where is not None
    assert where[1] == path_of(running_job)
    assert "sse-connect=" not in text
    assert "sse-connect=" in browser.get(where[1]).text


def test_what_moves_no_more_does_not_speak_of_standing_still(
    dashboard: Dashboard, running_job: Job
):
    browser = dashboard.browser("operator")
    path = path_of(running_job)
    assert "stands still" not in browser.get(f"{path}/requests/0").text
    assert browser.post(f"{path}/cancel").status_code == 303
    end_cancelled(dashboard, running_job.id)
    for tail in ("/requests/7", "/files", "/samples"):
        assert "stands still" not in browser.get(path + tail).text


def test_the_texts_inside_the_page_of_a_job_say_nothing_of_standing_still(
    dashboard: Dashboard, running_job: Job
):
    piece = dashboard.browser("read-only").get(
        f"{path_of(running_job)}/samples", **{"hx-request": "true"}
    )
    assert piece.status_code == 200
    assert "stands still" not in piece.text
