"""The list of Jobs: filters, the walk by key, and the bulk cancel."""

import re
from uuid import UUID

import pytest

from app.admin import job_reads
from app.admin.actions import JobFilter
from app.admin.job_reads import JobSearch, Place, list_jobs
from app.jobs.states import JobState
from app.kit.ids import public_id
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders

NAMES = re.compile(r'href="/admin/jobs/(job_[0-9a-f]{32})"')


def shown(text: str) -> list[str]:
    return NAMES.findall(text)


@pytest.fixture
def jobs(dashboard: Dashboard) -> list[UUID]:
    builders = Builders(dashboard.database)
    account = builders.an_account(balance=10_000_000)
    ids = [builders.a_job(account_id=account, requests=1).id for _ in range(120)]
    with dashboard.database.transaction() as conn:
        conn.execute("UPDATE jobs SET name = 'Sweep 7' WHERE id = %s", [ids[3]])
        # Many were submitted in the same instant.
        conn.execute("UPDATE jobs SET created_at = now() WHERE id = ANY(%s)", [ids[40:100]])
    return ids


def test_a_walk_over_all_pages_sees_every_job_once(dashboard: Dashboard, jobs):
    browser = dashboard.browser("read-only")
    seen: list[str] = []
    path = "/admin/jobs"
    pages = 0
    while path:
        text = browser.get(path).text
        seen += shown(text)
        pages += 1
        older = re.search(r'href="([^"]+)" rel="next"', text)
        path = older[1].replace("&amp;", "&") if older else ""
    assert pages == 3
    assert len(seen) == 120
    assert set(seen) == {public_id("job", job) for job in jobs}


def test_a_name_is_found_by_a_piece_of_it_and_an_id_by_its_beginning(dashboard: Dashboard, jobs):
    browser = dashboard.browser("read-only")
    name = public_id("job", jobs[3])
    assert shown(browser.get("/admin/jobs?q=sWEEP").text) == [name]
    assert name in shown(browser.get(f"/admin/jobs?q={name[:34]}").text)
    assert shown(browser.get("/admin/jobs?q=job_ffff").text) == []
    answer = browser.get(f"/admin/jobs?q={name}")
    assert (answer.status_code, answer.headers["location"]) == (303, f"/admin/jobs/{name}")


def test_filters_are_combined(dashboard: Dashboard, jobs):
    with dashboard.database.transaction() as conn:
        row = conn.execute("SELECT account_id FROM jobs LIMIT 1").fetchone()
    assert row is not None
    account = public_id("acct", row["account_id"])
    browser = dashboard.browser("read-only")
    found = browser.get(f"/admin/jobs?account={account}&status=queued&model=tiny&q=sweep&age=hour")
    assert shown(found.text) == [public_id("job", jobs[3])]
    assert shown(browser.get(f"/admin/jobs?account={account}&status=completed").text) == []
    assert shown(browser.get("/admin/jobs?model=other").text) == []
    assert len(shown(browser.get("/admin/jobs?status=unfinished").text)) == 50


def test_a_rare_name_is_looked_for_in_bounded_steps(dashboard: Dashboard, jobs):
    search = JobSearch(chosen=JobFilter(name="sweep"))
    after: Place | None = None
    found: list[UUID] = []
    steps = 0
    with dashboard.database.transaction() as conn:
        while steps < 20:
            page = list_jobs(conn, search, after=after, scan_max=25)
            steps += 1
            found += [row.job.id for row in page.rows]
            assert (page.looked_back_to is None) == (page.next is None)
            after = page.next
            if after is None:
                break
    assert found == [jobs[3]]
    assert steps == 5  # 120 Jobs, 25 looked at in each step


def test_every_choice_of_an_index_gives_the_same_jobs(dashboard: Dashboard, jobs, monkeypatch):
    monkeypatch.setattr(job_reads, "PAGE", 200)
    with dashboard.database.transaction() as conn:
        row = conn.execute("SELECT account_id FROM jobs LIMIT 1").fetchone()
        assert row is not None
        searches = [
            JobSearch(chosen=JobFilter()),
            JobSearch(chosen=JobFilter(), unfinished=True),
            JobSearch(chosen=JobFilter(state=JobState.queued)),
            JobSearch(chosen=JobFilter(model="tiny")),
            JobSearch(chosen=JobFilter(account_id=row["account_id"])),
        ]
        lists = [[item.job.id for item in list_jobs(conn, one).rows] for one in searches]
    assert all(found == lists[0] for found in lists)
    assert set(lists[0]) == set(jobs)


def test_a_bulk_cancel_counts_first_and_cancels_what_was_counted(dashboard: Dashboard, jobs):
    browser = dashboard.browser("operator")
    asked = browser.get("/admin/jobs/cancel?q=sweep")
    assert "Cancel 1 Job?" in asked.text
    assert "retry" not in asked.text
    assert dashboard.number("SELECT count(*) FROM jobs WHERE state = 'cancelling'") == 0
    fields = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', asked.text))
    done = browser.post("/admin/jobs/cancel", **fields)
    assert done.status_code == 303
    assert "1 Job cancelled" in browser.get(done.headers["location"]).text
    assert dashboard.number("SELECT count(*) FROM jobs WHERE state = 'cancelling'") == 1
    assert [entry.action for entry in dashboard.audit()][:2] == ["jobs.cancel", "job.cancel"]


def test_a_bulk_cancel_leaves_what_was_submitted_after_the_count(dashboard: Dashboard, jobs):
    browser = dashboard.browser("operator")
    asked = browser.get("/admin/jobs/cancel?status=unfinished").text
    fields = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', asked))
    later = Builders(dashboard.database).a_job(requests=1).id
    browser.post("/admin/jobs/cancel", **fields)
    assert dashboard.number("SELECT count(*) FROM jobs WHERE state = 'cancelling'") == 120
    assert dashboard.number("SELECT state FROM jobs WHERE id = %s", later) == "queued"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"q": "job_0"}, "A search by id names single Jobs"),
        ({"q": "job_" + "f" * 32}, "A search by id names single Jobs"),
        ({"age": "hour"}, "since is missing"),
        ({"age": "hour", "since": " "}, "since is missing"),
        ({"age": "hour", "since": "2026-01-01"}, "since must be a moment"),
        ({"age": "ever", "since": "2026-01-01T00:00:00+00:00"}, "age must be one of"),
        ({"status": "nonsense"}, "status must be"),
        ({"account": "acct_1"}, "account must be an id"),
        ({"until": ""}, "until is empty"),
    ],
    ids=str,
)
def test_a_bulk_cancel_with_a_filter_that_means_nothing_cancels_nothing(
    dashboard: Dashboard, fields, said
):
    job = Builders(dashboard.database).a_job(requests=1)
    sent = {"until": "2999-01-01T00:00:00+00:00", **fields}
    answer = dashboard.browser("operator").post("/admin/jobs/cancel", **sent)
    assert answer.status_code == 400
    assert said in answer.text
    assert dashboard.number("SELECT state FROM jobs WHERE id = %s", job.id) == "queued"
    assert dashboard.audit("jobs.cancel") == []


def test_only_the_cancel_that_did_something_says_so(dashboard: Dashboard):
    job = Builders(dashboard.database).a_job(requests=1)
    path = f"/admin/jobs/{public_id('job', job.id)}"
    browser = dashboard.browser("operator")
    assert browser.post(f"{path}/cancel").headers["location"] == f"{path}?said=cancelled"
    assert browser.post(f"{path}/cancel").headers["location"] == path


def test_a_reader_may_not_cancel(dashboard: Dashboard, jobs):
    browser = dashboard.browser("read-only")
    assert "/admin/jobs/cancel" not in browser.get("/admin/jobs?q=sweep").text
    assert browser.get("/admin/jobs/cancel?q=sweep").status_code == 403
    path = f"/admin/jobs/{public_id('job', jobs[0])}"
    assert browser.post(f"{path}/cancel").status_code == 403
    assert "Cancel this Job" not in browser.get(path).text
