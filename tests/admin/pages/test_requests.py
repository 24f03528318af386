"""Lists of requests: the walk by index, filters, bounded looks."""

import re

import pytest

from app.admin import request_reads
from app.admin.request_reads import RequestFilter, RequestPage, list_page
from app.jobs.claims import finish_shard
from app.jobs.states import RequestState
from app.kit.db import Conn
from app.kit.ids import public_id
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders, errored, succeeded
from tests.fixtures.parts import named_part

INDEX = re.compile(r'/requests/(\d+)">')


@pytest.fixture
def job(dashboard: Dashboard):
    """A Job of 130 requests: the first shard ended with two errors, the second is leased."""
    builders = Builders(dashboard.database)
    made = builders.a_job(requests=130, shard_size=20)
    worker = builders.a_worker()
    first = builders.a_lease(worker)
    with dashboard.database.transaction() as conn:
        results = [*succeeded([n for n in range(20) if n not in (4, 9)]), *errored([4, 9])]
        assert finish_shard(conn, first, results, named_part(first))
    builders.a_lease(worker)
    return made


def test_a_walk_over_all_pages_sees_every_request_once(dashboard: Dashboard, job):
    browser = dashboard.browser("read-only")
    path = f"/admin/jobs/{public_id('job', job.id)}/requests"
    seen: list[int] = []
    while path:
        text = browser.get(path).text
        seen += map(int, INDEX.findall(text))
        older = re.search(r'href="([^"]+)" rel="next"', text)
        path = older[1].replace("&amp;", "&") if older else ""
    assert seen == list(range(130))


@pytest.mark.parametrize(
    ("state", "indices"),
    [
        (RequestState.succeeded, [n for n in range(20) if n not in (4, 9)]),
        (RequestState.errored, [4, 9]),
        (RequestState.running, list(range(20, 40))),
        (RequestState.pending, list(range(40, 130))),
        (RequestState.cancelled, []),
    ],
)
@pytest.mark.parametrize("scan", [7, 20_000])
def test_a_state_is_found_in_bounded_looks(
    dashboard: Dashboard, job, *, state, indices, scan, monkeypatch
):
    monkeypatch.setattr(request_reads, "SCAN_MAX", scan)
    found: list[int] = []
    after = -1
    with dashboard.database.transaction() as conn:
        for _ in range(40):
            page = list_page(conn, job.id, RequestFilter(state), total=130, after=after)
            found += [row.request_index for row in page.rows]
            assert all(row.state == state for row in page.rows)
            if page.next is None:
                break
            assert page.next > after
            after = page.next
        else:
            pytest.fail("the walk does not end")
    assert found == indices


@pytest.mark.parametrize("state", ["running", "pending"])
def test_a_state_that_no_shard_can_hold_is_not_looked_for(dashboard: Dashboard, state, monkeypatch):
    monkeypatch.setattr(request_reads, "SCAN_MAX", 20)
    builders = Builders(dashboard.database)
    made = builders.a_job(requests=100, shard_size=100 if state == "pending" else 10)
    if state == "pending":
        builders.a_lease()
    path = f"/admin/jobs/{public_id('job', made.id)}/requests?status={state}"
    text = dashboard.browser("read-only").get(path).text
    assert "No request matches" in text
    assert "Look further" not in text


def test_a_walk_ends_behind_the_last_shard_that_can_hold_a_state(
    dashboard: Dashboard, job, monkeypatch
):
    monkeypatch.setattr(request_reads, "SCAN_MAX", 7)
    running = RequestFilter(RequestState.running)
    with dashboard.database.transaction() as conn:
        page = list_page(conn, job.id, running, total=130, after=34)
        assert [row.request_index for row in page.rows] == [35, 36, 37, 38, 39]
        assert page.next is None
        assert list_page(conn, job.id, running, total=130, after=39) == RequestPage([], None)


def test_what_ends_while_a_list_is_read_is_in_it_as_it_was(dashboard: Dashboard, monkeypatch):
    database, read_rows = dashboard.database, request_reads._rows
    builders = Builders(database)
    made = builders.a_job(requests=40, shard_size=20)
    shard = builders.a_lease()
    ended: list[bool] = []

    def end_the_shard_and_read(*asked):
        with database.transaction() as other:
            ended.append(finish_shard(other, shard, succeeded(range(20)), named_part(shard)))
        return read_rows(*asked)

    monkeypatch.setattr(request_reads, "_rows", end_the_shard_and_read)
    path = f"/admin/jobs/{public_id('job', made.id)}/requests?status=running"
    text = dashboard.browser("read-only").get(path).text
    assert ended == [True]
    assert list(map(int, INDEX.findall(text))) == list(range(20))
    assert "20 running" in text
    assert "badge good" not in text


@pytest.mark.parametrize("state", list(RequestState))
def test_a_list_of_a_new_job_does_not_search_every_shard_for_every_request(
    dashboard: Dashboard, state: RequestState
):
    builders = Builders(dashboard.database)
    made = builders.a_job(requests=1500, shard_size=1)  # the tables have no statistics yet
    builders.a_lease()
    with dashboard.database.transaction() as conn:
        before = shards_read(conn)
        list_page(conn, made.id, RequestFilter(state), total=1500)
        assert shards_read(conn) - before <= 3 * 1500  # the first one, the walk, the rows shown


def shards_read(conn: Conn) -> int:
    """Count how many rows of shards this session has read since its last report."""
    row = conn.execute(
        """
        SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) AS rows
        FROM pg_stat_xact_user_tables WHERE relname = 'shards'
        """
    ).fetchone()
    assert row is not None
    return int(row["rows"])


@pytest.mark.parametrize("state", [RequestState.cancelled, RequestState.expired])
def test_a_state_that_no_request_ended_in_needs_no_walk(
    dashboard: Dashboard, job, state, monkeypatch
):
    monkeypatch.setattr(request_reads, "SCAN_MAX", 7)
    path = f"/admin/jobs/{public_id('job', job.id)}/requests?status={state}"
    text = dashboard.browser("read-only").get(path).text
    assert "No request matches" in text
    assert "Look further" not in text


def test_a_code_leads_to_its_requests_with_their_messages(dashboard: Dashboard, job):
    browser = dashboard.browser("read-only")
    path = f"/admin/jobs/{public_id('job', job.id)}/requests"
    text = browser.get(f"{path}?code=steering_failed").text
    assert list(map(int, INDEX.findall(text))) == [4, 9]
    assert "It failed." in text
    assert "No request matches" in browser.get(f"{path}?code=other").text
    errored_ones = browser.get(f"{path}?code=steering_failed&status=errored").text
    assert list(map(int, INDEX.findall(errored_ones))) == [4, 9]
    for state in set(RequestState) - {RequestState.errored}:
        others = browser.get(f"{path}?code=steering_failed&status={state}").text
        assert "No request matches" in others
        assert INDEX.findall(others) == []
    assert "No request matches" in browser.get(f"{path}?custom_id=none").text


@pytest.mark.parametrize("index", ["130", "01", "-1", "x", "9" * 30])
def test_a_request_that_does_not_exist_is_a_page_with_404(dashboard: Dashboard, job, index):
    browser = dashboard.browser("read-only")
    answer = browser.get(f"/admin/jobs/{public_id('job', job.id)}/requests/{index}")
    assert answer.status_code == 404


def test_a_waiting_request_shows_its_open_hold(dashboard: Dashboard, job):
    browser = dashboard.browser("read-only")
    text = browser.get(f"/admin/jobs/{public_id('job', job.id)}/requests/100").text
    assert "No text yet" in text
    assert "open</span>" in text


def test_an_errored_request_shows_why_and_that_nothing_was_charged(dashboard: Dashboard, job):
    browser = dashboard.browser("read-only")
    text = browser.get(f"/admin/jobs/{public_id('job', job.id)}/requests/4").text
    assert "steering_failed" in text
    assert "released</span>" in text
