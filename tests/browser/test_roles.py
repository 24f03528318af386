"""What a role may not do is neither shown nor, when its address is typed in, done."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.admin.routes import NEEDS
from tests.browser.chromium import watch
from tests.browser.served import Scene
from tests.browser.visits import VISITS, Look, Visit, context_for

pytestmark = pytest.mark.slow

DESKTOP = Look("light", 1280)
# One page of each route: acts do not depend on what a page shows.
OPEN_TO_READERS = list(
    {
        visit.route: visit
        for visit in reversed(VISITS)
        if NEEDS[visit.route] == "read-only" and visit.status == 200
    }.values()
)
FORBIDDEN = [route for route, role in NEEDS.items() if role in {"operator", "admin"}]


@pytest.fixture(scope="module")
def reader(chromium: Browser, scene: Scene) -> Iterator[Page]:
    """A page of somebody who may only read."""
    context = context_for(chromium, scene, DESKTOP, role="read-only")
    watched = watch(context.new_page())
    watched.allow("status of 40")
    yield watched.page
    context.close()
    assert watched.complaints == []


@pytest.mark.parametrize("visit", OPEN_TO_READERS, ids=lambda visit: visit.name)
def test_a_reader_sees_the_page_and_no_act(reader: Page, scene: Scene, visit: Visit) -> None:
    reader.goto(scene.path(visit.path))
    expect(reader.locator("body")).to_contain_text(visit.shows)
    acts = reader.locator("form[method=post]").evaluate_all(
        "(forms) => forms.map((form) => new URL(form.action).pathname)"
    )
    assert acts == ["/admin/logout"]
    assert reader.locator(".danger").count() == 0


def test_a_reader_who_types_the_address_of_an_act_is_told_what_it_needs(
    reader: Page, scene: Scene
) -> None:
    answer = reader.goto("/admin/jobs/cancel?status=unfinished")
    assert answer is not None
    assert answer.status == 403
    expect(reader.get_by_role("heading", level=1)).to_have_text("Not allowed")
    alert = reader.get_by_role("alert")
    expect(alert).to_contain_text("This needs the role operator")
    expect(alert).to_contain_text("'read-only of the lab' has the role read-only")
    reader.get_by_role("link", name="To the overview").click()
    expect(reader.get_by_role("heading", level=1)).to_have_text("Overview")


@pytest.mark.parametrize("route", [route for route in FORBIDDEN if route.startswith("POST ")])
def test_a_form_that_a_reader_sends_anyway_is_refused_and_does_nothing(
    reader: Page, scene: Scene, route: str
) -> None:
    path = route.removeprefix("POST ").format(
        account=scene.accounts["lab"],
        key="key_" + "0" * 32,
        job_id=scene.jobs["running"],
        worker_id="worker_" + "0" * 32,
    )
    before = newest_act(scene)
    reader.goto("/admin/models")
    # As a page of the dashboard would send it, had it the form.
    with reader.expect_navigation() as coming:
        reader.evaluate(
            """(path) => {
                const form = document.createElement("form");
                form.method = "post";
                form.action = path;
                document.body.append(form);
                form.submit();
            }""",
            path,
        )
    assert coming.value.status == 403
    expect(reader.get_by_role("alert")).to_contain_text("This needs the role")
    assert newest_act(scene) == before
    assert scene.client.get_job(scene.jobs["running"])["status"] == "in_progress"


def newest_act(scene: Scene) -> str:
    """Give the moment of the newest act in the audit log."""
    found = re.search(r'<time datetime="([^"]+)"', scene.desk.page("/admin/audit"))
    assert found is not None
    return found[1]


def test_an_operator_may_cancel_and_drain_but_not_touch_tokens_or_keys(
    chromium: Browser, scene: Scene
) -> None:
    context = context_for(chromium, scene, DESKTOP, role="operator")
    page = context.new_page()
    page.goto(scene.path("/admin/jobs/{running}"))
    expect(page.get_by_text("Cancel…")).to_be_visible()
    page.goto("/admin/workers")
    expect(page.get_by_role("button", name="Drain the worker")).to_be_visible()
    page.goto(scene.path("/admin/accounts/{lab}"))
    expect(page.get_by_role("button", name="Stop Holds")).to_be_visible()
    expect(page.get_by_text("New key", exact=True)).to_have_count(0)
    expect(page.get_by_text("Revoke", exact=True)).to_have_count(0)
    expect(page.get_by_role("button", name="Show what will happen")).to_have_count(0)
    context.close()
