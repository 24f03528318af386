"""The dashboard without a mouse: Tab reaches everything, the focus is seen, Escape closes."""

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.acting import expect_audit
from tests.browser.chromium import watch
from tests.browser.served import Scene
from tests.browser.visits import Look, context_for, settle

pytestmark = pytest.mark.slow

DESKTOP = Look("light", 1280)
TABS_MAX = 400
# What a person can use, as far as it is shown: a closed <details> hides what it holds.
USABLE = """() => [...document.querySelectorAll(
    "a[href], button, input, select, textarea, summary, [tabindex='0']",
)].filter((element) => element.type !== "hidden" && !element.disabled
    && element.checkVisibility({ visibilityProperty: true }))"""
# Look at the element that has the focus: how it shows that, and note that it was there.
FOCUSED = """() => {
    const element = document.activeElement;
    if (element === null || element === document.body) return null;
    element.dataset.tillerSeen = "";
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    return {
        words: `${element.tagName} ${element.innerText || element.ariaLabel || element.name}`,
        outline: style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth),
        inWindow: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
    };
}"""
# Begin as on a page that was just loaded: the next Tab goes to the first thing of all.
TO_THE_TOP = """() => {
    document.documentElement.tabIndex = -1;
    document.documentElement.focus();
    document.documentElement.removeAttribute("tabindex");
}"""
Opens = Callable[[str | None], Page]


@pytest.fixture
def opens(chromium: Browser, scene: Scene) -> Iterator[Opens]:
    """Open a window of somebody with a role."""
    made = []

    def open_window(role: str | None) -> Page:
        context = context_for(chromium, scene, DESKTOP, role=role)
        made.append((context, watch(context.new_page())))
        return made[-1][1].page

    yield open_window
    for context, _ in made:
        context.close()
    assert [watched.complaints for _, watched in made] == [[]] * len(made)


@pytest.mark.parametrize(
    "path",
    [
        "/admin",
        "/admin/jobs?q=sweep",
        "/admin/jobs/{pairs}",
        "/admin/jobs/{running}",
        "/admin/jobs/{errors}/requests?status=errored",
        "/admin/jobs/{pairs}/requests/1",
        "/admin/workers",
        "/admin/accounts",
        "/admin/accounts/{lab}",
        "/admin/audit?action=account.create",
        "/admin/system",
    ],
)
def test_tab_reaches_everything_and_the_focus_is_seen(
    opens: Opens, scene: Scene, path: str
) -> None:
    page = opens("admin")
    page.goto(scene.path(path))
    settle(page)
    pause_live(page)
    page.evaluate(TO_THE_TOP)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    for _ in range(TABS_MAX):
        focused = page.evaluate(FOCUSED)
        if focused is None:
            break
        assert focused["outline"] >= 2, focused
        assert focused["inWindow"], focused
        page.keyboard.press("Tab")
    else:
        pytest.fail(f"{TABS_MAX} times Tab and no end")
    missed = page.evaluate(
        f"""() => ({USABLE})().filter((element) => !("tillerSeen" in element.dataset))
            .map((element) => element.outerHTML.slice(0, 200))"""
    )
    assert missed == []


def pause_live(page: Page) -> None:
    """Keep regions from being swapped for others while the focus walks through them."""
    button = page.locator("[data-live]")
    if button.count():
        button.click()
        expect(button).to_have_text("Paused")


def test_the_skip_link_leads_past_the_menu(opens: Opens) -> None:
    page = opens("admin")
    page.goto("/admin/accounts")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_in_viewport(ratio=1)
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("[data-live]")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Holds")).to_be_focused()


def test_a_person_logs_in_and_cancels_a_job_by_keyboard(opens: Opens, scene: Scene) -> None:
    page, job = opens(None), scene.submit("Cancelled by keyboard", requests=400)
    page.goto(f"/admin/jobs/{job}")
    expect(page.locator("[autofocus]")).to_be_focused()
    page.keyboard.type(scene.keys["operator"])
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Cancelled by keyboard")
    summary, box = page.locator(".confirm > summary"), page.locator(".confirm-box")
    tab_to(page, ".confirm > summary")
    page.keyboard.press("Enter")
    expect(box).to_be_visible()
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()
    expect(summary).to_be_focused()
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    expect(box.get_by_role("button")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").first).to_contain_text("The cancel was asked for")
    row = expect_audit(page, "job.cancel", "operator of the lab", target=job)
    expect(row).to_contain_text(re.compile("state (queued|in progress|in_progress) → cancelling"))


@pytest.mark.parametrize("path", ["/admin/jobs/{running}", "/admin/accounts/{local}"])
def test_escape_closes_whatever_asks_for_something(opens: Opens, scene: Scene, path: str) -> None:
    page = opens("admin")
    page.goto(scene.path(path))
    settle(page)
    asking = page.locator("details:has(form)")
    for place in asking.all():
        summary = place.locator("summary")
        summary.focus()
        page.keyboard.press("Enter")
        expect(place).to_have_attribute("open", "")
        page.keyboard.press("Tab")
        expect(summary).not_to_be_focused()
        page.keyboard.press("Escape")
        expect(place).not_to_have_attribute("open", "")
        expect(summary).to_be_focused()
    assert asking.count() >= 1


def tab_to(page: Page, selector: str) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(TABS_MAX):
        page.keyboard.press("Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    pytest.fail(f"Tab does not reach {selector}")
