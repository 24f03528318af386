"""What moves by itself: live regions while a Job runs, pausing them, charts, relative times."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.chromium import Watched, watch
from tests.browser.served import Scene, wait_for
from tests.browser.visits import Look, context_for, settle

pytestmark = pytest.mark.slow

DESKTOP = Look("light", 1280)
ROW = "tr:has-text('Long sweep')"
ENDED = re.compile(r"([\d,]+) of [\d,]+")


@pytest.fixture
def watched(chromium: Browser, scene: Scene) -> Iterator[Watched]:
    """A page of an admin; at the end it must have complained of nothing."""
    context = context_for(chromium, scene, DESKTOP)
    watched = watch(context.new_page())
    yield watched
    context.close()
    assert watched.complaints == []


def ended(place: Locator) -> int:
    """Read how many requests a page says have ended."""
    found = ENDED.search(place.inner_text())
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/admin", f"[sse-swap=live-jobs] {ROW}"),
        ("/admin/jobs?status=in_progress", f"[sse-swap=jobs] {ROW}"),
        ("/admin/jobs?status=unfinished&q=sweep", f"[sse-swap=jobs] {ROW}"),
        ("/admin/jobs/{running}", "[sse-swap=state]"),
    ],
    ids=["overview", "jobs", "jobs-filtered", "job"],
)
def test_a_count_moves_while_the_job_runs(
    watched: Watched, scene: Scene, path: str, place: str
) -> None:
    page = watched.page
    page.goto(scene.path(path))
    settle(page)
    page.evaluate("window.tillerSamePage = true")
    row = page.locator(place)
    before = ended(row)
    wait_for(lambda: ended(row) > before, f"more than {before} ended requests")
    assert page.evaluate("window.tillerSamePage") is True


def test_a_submitted_job_appears_in_the_list_and_its_shards_in_its_page(
    watched: Watched, scene: Scene
) -> None:
    page = watched.page
    page.goto("/admin/jobs?q=arrives+later")
    expect(page.get_by_text("No Job matches")).to_be_visible()
    settle(page)
    job = scene.submit("Arrives later", requests=400)
    page.get_by_role("link", name="Arrives later").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Arrives later")
    expect(page.locator("[sse-swap=shards] .cells li")).to_have_count(25)
    scene.client.cancel_job(job)
    expect(page.locator("[sse-swap=state] .badge")).to_have_text("cancelled", timeout=60_000)
    expect(page.get_by_role("button", name="Live")).to_be_hidden()


def test_pausing_holds_a_page_still_and_going_on_shows_the_newest(
    watched: Watched, scene: Scene
) -> None:
    page, place = watched.page, watched.page.locator("[sse-swap=state]")
    page.goto(scene.path("/admin/jobs/{running}"))
    settle(page)
    button = page.locator("[data-live]")
    button.click()
    expect(button).to_have_text("Paused")
    expect(button).to_have_attribute("aria-pressed", "true")
    page.evaluate(
        """() => {
            window.tillerHeld = 0;
            document.addEventListener("htmx:sseBeforeMessage", (event) => {
                if (event.target.matches("[sse-swap=state]")) window.tillerHeld += 1;
            });
        }"""
    )
    before = ended(place)
    wait_for(lambda: page.evaluate("window.tillerHeld") >= 2, "two texts that are held back")
    assert ended(place) == before
    button.click()
    expect(button).to_have_text("Live")
    wait_for(lambda: ended(place) > before, "the newest text")


def test_a_region_with_the_focus_in_it_is_left_alone(watched: Watched, scene: Scene) -> None:
    page = watched.page
    page.goto("/admin")
    settle(page)
    row = page.locator(f"[sse-swap=live-jobs] {ROW}")
    row.get_by_role("link").focus()
    before, messages = ended(row), page.evaluate("window.tillerMessages")
    wait_for(lambda: page.evaluate("window.tillerMessages") > messages + 4, "other regions")
    assert ended(row) == before
    page.evaluate("document.activeElement.blur()")
    wait_for(lambda: ended(row) > before, "the region to catch up")


def test_a_click_on_a_row_holds_nothing_back_and_scrolling_stays(
    watched: Watched, scene: Scene
) -> None:
    page = watched.page
    page.set_viewport_size({"width": 700, "height": 900})
    page.goto("/admin/jobs?q=sweep")
    settle(page)
    table = page.locator("[sse-swap=jobs] .table")
    table.evaluate("(table) => { table.scrollLeft = 40 }")
    table.focus()
    row = page.locator(f"[sse-swap=jobs] {ROW}")
    before = ended(row)
    wait_for(lambda: ended(row) > before, "the list to go on")
    assert table.evaluate("(table) => table.scrollLeft") == 40
    assert table.evaluate("(table) => table === document.activeElement")


def test_a_hidden_tab_gives_its_connection_back(watched: Watched, scene: Scene) -> None:
    page, place = watched.page, watched.page.locator("[sse-swap=state]")
    page.goto(scene.path("/admin/jobs/{running}"))
    settle(page)
    show(page, hidden=True)
    messages, before = page.evaluate("window.tillerMessages"), ended(place)
    other = page.context.new_page()
    other.goto(scene.path("/admin/jobs/{running}"))
    wait_for(lambda: ended(other.locator("[sse-swap=state]")) > before, "a tab that is seen")
    other.close()
    assert page.evaluate("window.tillerMessages") == messages
    show(page, hidden=False)
    wait_for(lambda: ended(place) > before, "the tab that is looked at again")


def show(page: Page, *, hidden: bool) -> None:
    """Tell a page that its tab was hidden, or is seen again: in a headless browser all are seen."""
    page.evaluate(
        """(hidden) => {
            Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def test_charts_are_drawn_and_follow_the_theme(watched: Watched, scene: Scene) -> None:
    page = watched.page
    page.goto("/admin")
    settle(page, charts=True)
    # Else a new minute would change the pictures, too.
    page.locator("[data-live]").click()
    expect(page.locator("[data-live]")).to_have_text("Paused")
    before = [ink(page, number) for number in (0, 1)]
    assert all(before), "a chart is blank"
    page.emulate_media(color_scheme="dark")
    expect(page.locator("[data-plot] canvas")).to_have_count(2)
    wait_for(lambda: [ink(page, number) for number in (0, 1)] != before, "charts in dark colours")


def ink(page: Page, number: int) -> str:
    """Give what a chart shows as a picture; empty while it shows nothing."""
    return str(
        page.locator("[data-plot] canvas")
        .nth(number)
        .evaluate(
            """(canvas) => {
                const empty = document.createElement("canvas");
                [empty.width, empty.height] = [canvas.width, canvas.height];
                const picture = canvas.toDataURL();
                return picture === empty.toDataURL() ? "" : picture;
            }"""
        )
    )


def test_relative_times_grow_older_and_say_the_exact_moment(watched: Watched, scene: Scene) -> None:
    page = watched.page
    page.clock.install()
    page.goto("/admin/audit")
    moment = page.locator("time[data-relative]").first
    before = moment.inner_text()
    exact = moment.get_attribute("datetime")
    assert exact is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", exact)
    assert moment.get_attribute("title") == exact
    page.clock.run_for(3 * 3_600_000)
    expect(moment).not_to_have_text(before)
    expect(moment).to_have_text("3 h ago")
