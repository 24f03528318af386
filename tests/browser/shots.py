"""Takes a picture of every page of the dashboard, for a person to look at.

    python -m tests.browser.shots --out DIR [--model FOLDER] [--only NAME ...]

Both themes, both widths, from a whole service while a Job runs; FOLDER holds a model that writes
English, without it a tiny random one runs. Tests and pictures visit the same pages.
"""

import argparse
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page

from tests.browser.chromium import launched, why_not
from tests.browser.served import Scene, served
from tests.browser.visits import LOOKS, VISITS, Look, context_for, settle


def main() -> int:
    """Take the pictures; 1 where there is no browser."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", nargs="*", default=(), help="names of pages")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.stderr.write(f"{reason}\n")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        launched() as chromium,
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder) / "data", options.model) as scene,
    ):
        scene.desk.post("/admin/system/invariants")
        for look in LOOKS:
            shoot(chromium, scene, look, out=options.out, only=options.only)
    return 0


def shoot(chromium: Browser, scene: Scene, look: Look, *, out: Path, only: Collection[str]) -> None:
    """Take every page in one look."""
    windows = {role: context_for(chromium, scene, look, role=role) for role in (None, "admin")}
    for visit in VISITS:
        if only and visit.name not in only:
            continue
        page = windows[visit.role].new_page()
        page.goto(scene.path(visit.path))
        settle(page, charts=visit.name == "overview")
        take(page, out / f"{visit.name}-{look}.png")
        page.close()
    if not only:
        page = windows["admin"].new_page()
        for name in shoot_acts(page, scene):
            take(page, out / f"{name}-{look}.png")
    for window in windows.values():
        window.close()


def shoot_acts(page: Page, scene: Scene) -> Iterator[str]:
    """Walk to what only a click shows; give the name of each picture to take."""
    page.goto(scene.path("/admin/jobs/{running}"))
    page.get_by_text("Cancel…").click()
    yield "confirm"
    account = scene.path("/admin/accounts/{lab}")
    page.goto(account)
    page.get_by_text("New key", exact=True).click()
    page.get_by_text("Revoke", exact=True).first.click()
    yield "account-open"
    page.locator("form[action$='/tokens/ask']").get_by_label("Tokens").fill("250 000")
    page.locator("form[action$='/tokens/ask']").get_by_label("Reason").fill("more for the study")
    with page.expect_navigation():
        page.get_by_role("button", name="Show what will happen").click()
    yield "tokens"
    page.goto(account)
    page.get_by_text("New key", exact=True).click()
    page.get_by_label("Name").fill("another notebook")
    with page.expect_navigation():
        page.get_by_role("button", name="Create the key").click()
    yield "key"
    page.goto(f"{account}?said=grant")
    yield "account-said"
    menu = page.locator("[data-menu]")
    if menu.is_visible():
        menu.click()
        yield "menu"


def take(page: Page, file: Path) -> None:
    """Write a picture of the whole page."""
    page.screenshot(path=file, full_page=True)
    sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    sys.exit(main())
