"""Pages when there is nothing to show, and when something is asked for that does not exist."""

import pytest

from tests.admin.people import Dashboard

PAGES = {
    "/admin": "Nothing to do",
    "/admin/jobs": "No Jobs yet",
    "/admin/jobs?status=failed": "No Job matches",
    "/admin/workers": "No worker is there",
    "/admin/models": "tiny",
}
NO_JOB = "/admin/jobs/job_" + "0" * 32


@pytest.mark.parametrize("path", PAGES)
def test_an_empty_service_says_so_in_words(dashboard: Dashboard, path):
    answer = dashboard.browser("read-only").get(path)
    assert answer.status_code == 200
    assert PAGES[path] in answer.text


@pytest.mark.parametrize(
    "path",
    [
        NO_JOB,
        f"{NO_JOB}/samples",
        f"{NO_JOB}/files",
        f"{NO_JOB}/files/results/part-0000000.1.parquet",
        f"{NO_JOB}/requests",
        f"{NO_JOB}/requests/0",
        "/admin/jobs/job_12",
        "/admin/live?page=job&job=job_" + "0" * 32,
        "/admin/nothing",
    ],
)
def test_what_does_not_exist_is_a_page_with_404(dashboard: Dashboard, path):
    answer = dashboard.browser("read-only").get(path)
    assert answer.status_code == 404
    assert "<h1>Nothing here</h1>" in answer.text


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/admin/jobs?status=nonsense", "status must be"),
        ("/admin/jobs?age=ever", "age must be"),
        ("/admin/jobs?account=me", "account must be an id"),
        ("/admin/jobs?after=here", "after is not a place"),
        ("/admin/jobs?after=2026-01-01~" + "0" * 32, "ISO 8601 with its offset"),
    ],
)
def test_a_filter_that_cannot_be_read_is_named(dashboard: Dashboard, path, said):
    answer = dashboard.browser("read-only").get(path)
    assert answer.status_code == 400
    assert said in answer.text


def test_the_overview_says_which_errors_it_counts(dashboard: Dashboard):
    text = dashboard.browser("read-only").get("/admin").text
    assert "of the 20 newest Jobs that have any, the first 500 of each, and of the last day" in text
    assert "newest 1,000 Completions" in text
    assert "No Job has an errored request" in text


def test_a_page_needs_no_script_and_carries_none_inside(dashboard: Dashboard):
    text = dashboard.browser("admin").get("/admin").text
    assert "<script>" not in text
    assert 'style="' not in text
    assert 'onclick="' not in text
