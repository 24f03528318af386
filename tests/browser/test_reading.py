"""Finding and fetching: filters, pages by key, downloads, the theme, the menu of a phone."""

import hashlib
import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.chromium import watch
from tests.browser.served import Scene
from tests.browser.visits import Look, context_for, settle

pytestmark = pytest.mark.slow

PHONE = Look("light", 390)
DESKTOP = Look("light", 1280)
DARK = "rgb(19, 20, 22)"
Opens = Callable[[Look], Page]


@pytest.fixture
def opens(chromium: Browser, scene: Scene) -> Iterator[Opens]:
    """Open windows of an admin; none of their pages may complain."""
    made = []

    def open_window(look: Look) -> Page:
        context = context_for(chromium, scene, look)
        made.append((context, watch(context.new_page())))
        return made[-1][1].page

    yield open_window
    for context, _ in made:
        context.close()
    assert [watched.complaints for _, watched in made] == [[]] * len(made)


def test_jobs_are_found_by_state_name_account_and_id(opens: Opens, scene: Scene) -> None:
    page = opens(DESKTOP)
    page.goto("/admin/jobs")
    rows = page.locator("tbody tr")
    page.get_by_label("State").select_option("Cancelled")
    page.get_by_role("button", name="Show").click()
    expect(rows.filter(has_text="Started by mistake")).to_have_count(1)
    expect(rows.filter(has_text="Long sweep")).to_have_count(0)
    expect(page.get_by_label("State")).to_have_value("cancelled")
    page.get_by_role("link", name="Reset").click()
    page.get_by_label("Account id").fill(scene.accounts["lab"])
    page.get_by_label("Submitted").select_option("Last hour")
    page.get_by_role("button", name="Show").click()
    expect(rows.filter(has_text="Interpretability lab").first).to_be_visible()
    expect(rows.filter(has_text="local")).to_have_count(0)
    page.get_by_role("link", name="Reset").click()
    page.get_by_label("Name or id").fill(scene.jobs["pairs"])
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sentiment sweep at Layer 2")


def test_jobs_are_paged_without_losing_or_repeating_one(opens: Opens, scene: Scene) -> None:
    page = opens(DESKTOP)
    made = {scene.submit(f"Paged {number:02}", requests=1) for number in range(60)}
    try:
        page_through(page, made)
    finally:
        for job in made:
            scene.client.cancel_job(job)  # or they crowd out what other tests look for


def page_through(page: Page, made: set[str]) -> None:
    """Go to the older Jobs and back; all are seen once."""
    page.goto("/admin/jobs?q=Paged")
    names = page.locator("tbody td.head .sub")
    expect(names).to_have_count(50)
    first = titles(page)
    page.get_by_role("link", name="Older").click()
    expect(names).to_have_count(10)
    assert first.isdisjoint(second := titles(page))
    assert first | second == made
    page.get_by_role("link", name="Newest").click()
    expect(names).to_have_count(50)
    assert titles(page) == first


def titles(page: Page) -> set[str]:
    """Read the whole ids of the Jobs in a list."""
    cells = page.locator("tbody td.head .sub")
    return set(cells.evaluate_all("(cells) => cells.map((cell) => cell.title)"))


def test_requests_are_filtered_and_paged(opens: Opens, scene: Scene) -> None:
    page = opens(DESKTOP)
    page.goto(scene.path("/admin/jobs/{errors}/requests"))
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(40)
    page.get_by_label("State").select_option("errored")
    page.get_by_role("button", name="Show").click()
    expect(rows).to_have_count(4)
    rows.first.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Request 3")
    page.goto(scene.path("/admin/jobs/{errors}/requests"))
    page.get_by_label("custom_id, exactly").fill("try-17")
    page.get_by_role("button", name="Show").click()
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("try-17")
    page.goto(scene.path("/admin/jobs/{running}/requests"))
    expect(rows.first.locator("td").first).to_have_text("0")
    page.get_by_role("link", name="Next").click()
    expect(rows.first.locator("td").first).to_have_text("50")
    page.get_by_role("link", name="← First").click()
    expect(rows.first.locator("td").first).to_have_text("0")


def test_files_are_downloaded_with_the_bytes_of_the_manifest(opens: Opens, scene: Scene) -> None:
    page = opens(DESKTOP)
    manifest = scene.client.manifest(scene.jobs["captures"])["files"]
    assert {"results", "activations"} <= {entry["path"].split("/")[0] for entry in manifest}
    page.goto(scene.path("/admin/jobs/{captures}/files"))
    for entry in manifest:
        with page.expect_download() as coming:
            page.get_by_role("link", name=entry["path"]).click()
        file = coming.value
        assert file.suggested_filename == entry["path"].replace("/", "-")
        data = file.path().read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]
        row = page.locator("tr", has_text=entry["path"])
        expect(row.locator("code")).to_have_attribute("title", entry["sha256"])


def test_samples_stand_beside_their_baseline(opens: Opens, scene: Scene) -> None:
    page = opens(DESKTOP)
    page.goto(scene.path("/admin/jobs/{pairs}"))
    settle(page)
    samples = page.locator(".sample")
    expect(samples).to_have_count(6)
    first = samples.first.locator(".version")
    expect(first).to_have_count(2)
    expect(first.nth(0)).to_contain_text("Baseline")
    expect(first.nth(1)).to_contain_text(re.compile("Steering vector: adds \u2212?4 "))
    boxes = [first.nth(number).bounding_box() for number in (0, 1)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] < boxes[1]["x"]
    texts = [first.nth(number).locator(".text").inner_text() for number in (0, 1)]
    assert texts[0] != texts[1]


def test_the_theme_is_chosen_and_remembered(opens: Opens) -> None:
    page = opens(DESKTOP)
    page.goto("/admin/models")
    button = page.locator("[data-theme-toggle]")
    for name in ("light", "dark"):
        button.click()
        expect(button).to_have_text(f"Theme: {name}")
    expect(page.locator("body")).to_have_css("background-color", DARK)
    page.get_by_role("link", name="Workers").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("body")).to_have_css("background-color", DARK)
    other = page.context.new_page()
    other.goto("/admin/system")
    expect(other.locator("body")).to_have_css("background-color", DARK)
    button.click()
    expect(button).to_have_text("Theme: auto")
    expect(page.locator("body")).not_to_have_css("background-color", DARK)


def test_the_menu_of_a_phone_opens_closes_and_leads_on(opens: Opens) -> None:
    page = opens(PHONE)
    page.goto("/admin/models")
    button, menu = page.locator("[data-menu]"), page.locator("#menu")
    expect(menu).to_be_hidden()
    expect(button).to_have_attribute("aria-expanded", "false")
    button.click()
    expect(menu).to_be_visible()
    expect(button).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(menu).to_be_hidden()
    expect(button).to_be_focused()
    expect(button).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("Enter")
    menu.get_by_role("link", name="Accounts").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Accounts")
    expect(menu).to_be_hidden()
