"""Pages that say what went wrong: whoever is logged in keeps the menu, and nobody else sees it."""

import pytest

from tests.admin.people import Dashboard

MENU = 'aria-label="Dashboard"'
WRONG = {
    "/admin/nothing": 404,
    "/admin/jobs/job_" + "0" * 32: 404,
    "/admin/jobs?status=nonsense": 400,
    "/admin/jobs?name=%00": 400,
}


@pytest.mark.parametrize("path", WRONG)
def test_an_error_page_of_somebody_who_is_logged_in_keeps_the_menu(dashboard: Dashboard, path: str):
    answer = dashboard.browser("read-only").get(path)
    assert answer.status_code == WRONG[path]
    assert MENU in answer.text
    assert "read-only" in answer.text
    # The heading says what kind of error it is, the message below it which one.
    assert answer.text.count("<h1>") == 1
    heading = answer.text.partition("<h1>")[2].partition("</h1>")[0]
    assert f'notice-title">{heading}<' not in answer.text


def test_a_wrong_method_and_a_refused_act_keep_the_menu(dashboard: Dashboard):
    browser = dashboard.browser("read-only")
    for answer, status in (
        (browser.post("/admin/system"), 405),
        (browser.post("/admin/accounts", name="x"), 403),
    ):
        assert answer.status_code == status
        assert MENU in answer.text


def test_an_error_page_of_nobody_has_the_name_of_the_service_and_no_menu(dashboard: Dashboard):
    text = dashboard.browser().get("/admin/nothing").text
    assert MENU not in text
    assert "<span>Tiller</span>" in text
    assert "<span>Tiller</span>" in dashboard.browser().get("/admin/login").text
