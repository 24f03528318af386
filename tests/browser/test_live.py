"""What moves by itself: live regions while a Job runs, what holds them, how they end, charts."""

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from tests.browser.chromium import Watched, watch
from tests.browser.served import Desk, Scene, wait_for
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


def await_change(read: Callable[[], object]) -> None:
    """Wait until a place says something else than now."""
    before = read()
    wait_for(lambda: read() != before, f"something else than {before}")


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
    cells = page.locator("[sse-swap=shards] .cells li")
    wait_for(lambda: cells.count() >= 25, "its shards")  # more, when a lease has split one
    scene.client.cancel_job(job)
    expect(page.locator("[sse-swap=state] .badge")).to_have_text("cancelled", timeout=60_000)
    expect(page.locator("[data-announce]")).to_have_text("This Job is cancelled.")
    expect(page.locator("[data-live]")).to_be_hidden()
    expect(page.locator("[data-connection]")).to_be_hidden()


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


def test_a_region_with_the_focus_of_the_keyboard_is_left_alone_and_the_page_says_so(
    watched: Watched, scene: Scene
) -> None:
    page, button = watched.page, watched.page.locator("[data-live]")
    page.goto("/admin")
    settle(page)
    row = page.locator(f"[sse-swap=live-jobs] {ROW}")
    row.get_by_role("link").focus()
    before, messages = ended(row), page.evaluate("window.tillerMessages")
    wait_for(lambda: page.evaluate("window.tillerMessages") > messages + 4, "other regions")
    expect(button).to_have_text("Held while in use")
    assert ended(row) == before
    page.evaluate("document.activeElement.blur()")
    wait_for(lambda: ended(row) > before, "the region to catch up")
    expect(button).to_have_text("Live")


def test_a_link_that_was_opened_in_another_tab_holds_nothing_back_and_keeps_the_focus(
    watched: Watched, scene: Scene
) -> None:
    page = watched.page
    page.goto("/admin")
    settle(page)
    row = page.locator(f"[sse-swap=live-jobs] {ROW}")
    with page.context.expect_page() as opened:
        row.get_by_role("link").click(modifiers=["ControlOrMeta"])
    opened.value.close()
    page.bring_to_front()
    before = ended(row)
    wait_for(lambda: ended(row) > before, "the region that was clicked in")
    focused = "document.activeElement.getAttribute('href')"
    wait_for(lambda: page.evaluate(focused) == scene.path("/admin/jobs/{running}"), "the focus")


def test_a_click_on_a_row_holds_nothing_back_and_scrolling_stays(
    watched: Watched, scene: Scene
) -> None:
    page = watched.page
    page.set_viewport_size({"width": 700, "height": 900})
    page.goto("/admin/jobs?q=sweep")
    settle(page)
    table = page.locator("[sse-swap=jobs] .table")
    # In one step: between two the table may be another.
    page.evaluate(
        """() => {
            const table = document.querySelector("[sse-swap=jobs] .table");
            table.scrollLeft = 40;
            table.focus();
        }"""
    )
    row = page.locator(f"[sse-swap=jobs] {ROW}")
    before = ended(row)
    wait_for(lambda: ended(row) > before, "the list to go on")
    kept = "(table) => table.scrollLeft === 40 && table === document.activeElement"
    wait_for(lambda: table.evaluate(kept), "the table as it was left")


def test_a_click_is_not_lost_to_a_region_that_is_renewed_meanwhile(
    watched: Watched, scene: Scene
) -> None:
    page = watched.page
    page.goto("/admin/jobs?q=sweep")
    settle(page)
    link = page.locator(f"[sse-swap=jobs] {ROW}").get_by_role("link").first
    address = link.get_attribute("href")
    assert address
    link.hover()
    page.mouse.down()
    expect(page.locator("[data-live]")).to_contain_text("Held while in use")
    page.mouse.up()
    expect(page).to_have_url(scene.base + address)


def test_a_menu_of_the_browser_holds_nothing_back(watched: Watched, scene: Scene) -> None:
    page, button = watched.page, watched.page.locator("[data-live]")
    page.goto("/admin/jobs?q=sweep")
    settle(page)
    row = page.locator(f"[sse-swap=jobs] {ROW}")
    row.get_by_role("link").first.hover()
    page.mouse.down(button="right")  # and what follows goes to the menu
    before = ended(row)
    wait_for(lambda: ended(row) > before, "the list to go on")
    expect(button).to_have_text("Live")


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


def test_the_page_of_workers_hears_each_heartbeat(watched: Watched, scene: Scene) -> None:
    page = watched.page
    page.goto("/admin/workers")
    settle(page)
    heard = page.locator("[sse-swap=workers] [data-label=Heartbeat] time").first
    for _ in range(3):
        await_change(lambda: heard.get_attribute("datetime"))
    wait_for(lambda: re.fullmatch(r"just now|\d s ago", heard.inner_text()), "a fresh heartbeat")


def test_the_requests_of_a_job_move_while_it_runs(watched: Watched, scene: Scene) -> None:
    page = watched.page
    page.goto(scene.path("/admin/jobs/{running}/requests?status=running"))
    settle(page)
    counts, rows = page.locator("[sse-swap=counts]"), page.locator("[sse-swap=requests] tbody")
    await_change(counts.inner_text)
    await_change(rows.inner_text)
    expect(rows.locator(".badge").first).to_have_text("running")


def test_an_account_is_charged_before_ones_eyes(watched: Watched, scene: Scene) -> None:
    page = watched.page
    page.goto(scene.path("/admin/accounts/{local}"))
    settle(page)
    await_change(page.locator("[sse-swap=tokens]").inner_text)
    await_change(page.locator("[sse-swap=entries]").inner_text)


def test_the_keys_of_an_account_wait_while_a_question_about_one_is_open(
    watched: Watched, scene: Scene
) -> None:
    page, button = watched.page, watched.page.locator("[data-live]")
    page.goto(scene.path("/admin/accounts/{lab}"))
    settle(page)
    keys = page.locator("[sse-swap=keys]")
    question = keys.locator("details").first
    question.locator("summary").click()
    scene.desk.make_key(scene.accounts["lab"], "made meanwhile", "jobs:read")
    expect(button).to_have_text("Held while in use")
    expect(question.get_by_role("button", name="Revoke for good")).to_be_visible()
    expect(keys.get_by_text("made meanwhile")).to_have_count(0)
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    expect(keys.get_by_text("made meanwhile")).to_be_visible()
    expect(button).to_have_text("Live")


def test_a_status_line_is_read_out_when_it_changes_and_not_at_each_text(
    watched: Watched, scene: Scene
) -> None:
    page, place = watched.page, watched.page.locator("[sse-swap=state]")
    page.goto(scene.path("/admin/jobs/{running}"))
    settle(page)
    page.evaluate(
        """() => {
            window.tillerRead = [];
            new MutationObserver((changes) => {
                for (const { target, addedNodes } of changes) {
                    const line = target.closest?.("[role=status], [role=alert]");
                    if (line && addedNodes.length) window.tillerRead.push(line.outerHTML);
                    for (const node of addedNodes) {
                        const lines = node.querySelectorAll?.("[role=status], [role=alert]") ?? [];
                        window.tillerRead.push(...[...lines].map((each) => each.outerHTML));
                    }
                }
            }).observe(document.body, { subtree: true, childList: true });
        }"""
    )
    for _ in range(3):
        await_change(lambda: ended(place))
    assert page.evaluate("window.tillerRead") == []
    expect(page.locator("[data-announce]")).to_have_text("This Job is in progress.")


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "hidden"])
def test_a_page_stays_and_says_that_its_session_is_over(
    chromium: Browser, scene: Scene, *, seen: bool
) -> None:
    path = scene.path("/admin/jobs/{running}")
    with Desk(scene.base, scene.keys["operator"]) as own:
        context = chromium.new_context(base_url=scene.base, storage_state=own.session())
        watched = watch(context.new_page())
        page = watched.page
        page.goto(path)
        settle(page)
        show(page, hidden=not seen)
        own.post("/admin/logout")
        show(page, hidden=False)
    said = page.locator("[data-connection]")
    expect(said).to_contain_text("You are logged out")
    expect(page.locator("[data-live]")).to_be_hidden()
    assert page.url == f"{scene.base}{path}"
    assert watched.complaints == []
    login_again(context, page, path, scene)


def login_again(context: BrowserContext, page: Page, path: str, scene: Scene) -> None:
    """Load the page again, log in, and stand where one stood; then close the window."""
    page.reload()
    page.get_by_label("Admin key").fill(scene.keys["operator"])
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{scene.base}{path}")
    context.close()


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
