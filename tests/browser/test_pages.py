"""Every page of the dashboard in Chromium while a Job runs: both themes, wide and narrow."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.admin.routes import routes
from tests.browser.chromium import Watched, watch
from tests.browser.served import Scene
from tests.browser.shots import shoot_acts
from tests.browser.visits import LOOKS, NOT_PAGES, VISITS, Look, Visit, context_for, settle

pytestmark = pytest.mark.slow

# Both themes and both widths; all four looks would take twice as long and find the same.
CHECKED_BY_AXE = (Look("light", 1280), Look("dark", 390))
Windows = Callable[[Look, str | None], BrowserContext]


@pytest.fixture(scope="module")
def window(chromium: Browser, scene: Scene) -> Iterator[Windows]:
    """Give the window of a look and a role (None: not logged in); the same one each time."""
    kept: dict[tuple[Look, str | None], BrowserContext] = {}

    def give(look: Look, role: str | None) -> BrowserContext:
        if (look, role) not in kept:
            kept[look, role] = context_for(chromium, scene, look, role=role)
        return kept[look, role]

    yield give
    for context in kept.values():
        context.close()


def test_every_page_is_visited() -> None:
    pages = {route for route in routes() if route.startswith("GET ")} - set(NOT_PAGES)
    assert {visit.route for visit in VISITS} == pages, "give each page a Visit in visits.py"


@pytest.mark.parametrize("look", LOOKS, ids=str)
@pytest.mark.parametrize("visit", VISITS, ids=lambda visit: visit.name)
def test_a_page_is_sound(window: Windows, scene: Scene, visit: Visit, look: Look) -> None:
    page = window(look, visit.role).new_page()
    try:
        watched = watch(page)
        if visit.status >= 400:
            watched.allow(f"status of {visit.status}")
        answer = page.goto(scene.path(visit.path))
        assert answer is not None
        assert answer.status == visit.status
        settle(page)
        expect(page.locator("body")).to_contain_text(visit.shows)
        check_shape(page, look)
        check_colours(page, look)
        if look in CHECKED_BY_AXE:
            check_access(page)
        check_quiet(watched, scene)
    finally:
        page.close()


@pytest.mark.parametrize("look", LOOKS, ids=str)
def test_what_only_a_click_shows_is_sound(window: Windows, scene: Scene, look: Look) -> None:
    page = window(look, "admin").new_page()
    try:
        watched = watch(page)
        for _ in shoot_acts(page, scene):
            check_shape(page, look)
            if look in CHECKED_BY_AXE:
                check_access(page)
        check_quiet(watched, scene)
    finally:
        page.close()


def check_shape(page: Page, look: Look) -> None:
    """One heading, nothing wider than the window; on a phone no table scrolls sideways either."""
    expect(page.locator("h1")).to_have_count(1)
    over = page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert over <= 0, f"{over} pixels too wide"
    if look.width < 600:
        wide = page.evaluate(
            """() => [...document.querySelectorAll(".table")]
                .filter((table) => table.scrollWidth > table.clientWidth)
                .map((table) => table.innerText.slice(0, 200))"""
        )
        assert wide == [], wide


def check_colours(page: Page, look: Look) -> None:
    """The page follows the theme of the system."""
    lightness = page.evaluate(
        """() => getComputedStyle(document.body).backgroundColor
            .match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3"""
    )
    assert (lightness > 128) is (look.theme == "light")


def check_access(page: Page) -> None:
    """Nothing that axe-core calls serious or critical."""
    found: dict[str, Any] = Axe().run(page).response
    bad = [
        f"{item['id']} ({item['impact']}): {item['help']}: "
        + "; ".join(f"{node['target']} {node['failureSummary']}" for node in item["nodes"][:3])
        for item in found["violations"]
        if item["impact"] in {"serious", "critical"}
    ]
    assert found["testEngine"]["name"] == "axe-core"
    assert bad == [], "\n".join(bad)


def check_quiet(watched: Watched, scene: Scene) -> None:
    """The page complains of nothing and asks nobody but this service."""
    assert watched.complaints == []
    names = "() => performance.getEntriesByType('resource').map((entry) => entry.name)"
    foreign = [name for name in watched.page.evaluate(names) if not name.startswith(scene.base)]
    assert foreign == []
