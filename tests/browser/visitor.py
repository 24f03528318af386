"""Somebody at the dashboard, in Chromium, who reads each page and looks for what it did.

The session changes from page to page, so that the name of every operator is shown on some.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from playwright.sync_api import Browser, Page

from tests.browser.chromium import Watched, watch
from tests.browser.detector import Detector, Seen, lines, look
from tests.browser.full_house import House
from tests.browser.payloads import PAYLOADS, tagged

# A form as a page of the dashboard would send it.
SUBMIT: Final = """
([action, fields]) => {
  const form = document.createElement("form");
  Object.assign(form, {method: "post", action});
  for (const [name, value] of fields) {
    const input = document.createElement("input");
    Object.assign(input, {type: "hidden", name, value});
    form.append(input);
  }
  document.body.append(form);
  form.submit();
}
"""
STATIC: Final = frozenset({"script", "stylesheet", "image"})


@dataclass
class Visitor:
    """One browser context; nothing may happen in it but what its visits ask for."""

    house: House
    page: Page
    watched: Watched
    detector: Detector
    turn: int = -1

    @property
    def base(self) -> str:
        """The address of the dashboard."""
        return self.house.premises.base

    def visit(
        self, path: str, *texts: str, status: int = 200, wait_for: str = "", is_bare: bool = False
    ) -> Seen:
        """Open a page, which must show all of these texts and do nothing else.

        A page that is bare does not know who is logged in.
        """
        # What the page before went on to do; its pieces and its stream may still have come.
        late = self.detector.strangers(
            lambda *asked: asked[0] != "document" and self._is_ours(*asked)
        )
        assert not late, f"{self.page.url[:200]} asked for {late}"
        operator = self.next_operator()
        answer = self.page.goto(f"{self.base}{path}")
        assert answer is not None
        assert answer.status == status, f"{path[:200]}: {answer.status}"
        if wait_for:
            self.page.wait_for_selector(wait_for, state="attached")
        return self.read(*texts, *(() if is_bare else (operator,)))

    def send(self, path: str, fields: list[tuple[str, str]], *texts: str) -> Seen:
        """Send a form from the page that is open, and read the page that answers."""
        with self.page.expect_navigation():
            self.page.evaluate(SUBMIT, [path, fields])
        return self.read(*texts)

    def walk(self, path: str) -> tuple[str, int]:
        """Open a list and every further page of it; give all that they say, and their number."""
        found, pages = [], 0
        here: str | None = path
        while here:
            found.append(self.visit(here).all_text)
            pages += 1
            link = self.page.query_selector("a[rel=next]")
            here = None if link is None else link.get_attribute("href")
        return "\n".join(found), pages

    def next_operator(self) -> str:
        """Take the session of the next operator; give their name."""
        self.turn = (self.turn + 1) % len(PAYLOADS)
        cookie = {
            "name": "tiller_session",
            "value": self.house.sessions[self.turn],
            "domain": "127.0.0.1",
            "path": "/admin",
            "httpOnly": True,
            "sameSite": "Strict",
        }
        self.page.context.add_cookies([cookie])  # type: ignore[list-item]  # a TypedDict
        return tagged(PAYLOADS[self.turn], "o")

    def read(self, *texts: str) -> Seen:
        """Read the page that is open, which came by one navigation."""
        seen = look(self.page)
        self.assert_quiet(seen, documents=1)
        missing = missing_in(seen.all_text, texts)
        assert not missing, f"{self.page.url[:200]} does not show {missing}"
        return seen

    def assert_quiet(self, seen: Seen, *, documents: int) -> None:
        """Nothing ran, nothing strange is in the page, nothing was asked for but `documents`."""
        where = self.page.url[:200]
        assert self.page.url.startswith(f"{self.base}/admin"), f"led away to {where}"
        loaded = sum(kind == "document" for kind, _ in self.detector.asked)
        assert loaded == documents, f"{where}: {self.detector.asked}"
        found = [
            *(f"asked for {text}" for text in self.detector.strangers(self._is_ours)),
            *(f"made {text}" for text in seen.strange),
            *(f"ran {text}" for text in (*seen.ran, *self.detector.ran)),
            *self.watched.complaints,
        ]
        assert not found, f"{where}: {found}"

    def _is_ours(self, kind: str, address: str) -> bool:
        if not address.startswith(f"{self.base}/admin"):
            return kind == "page"
        path = address.removeprefix(self.base)
        if kind == "other":  # the icon of the page
            return path.startswith("/admin/static/mark.svg")
        if kind in STATIC:
            return path.startswith("/admin/static/")
        if kind == "eventsource":
            return path.startswith("/admin/live")
        return kind == "document" or path.endswith("/samples")


@contextmanager
def visiting(chromium: Browser, house: House, *, bypass_csp: bool = False) -> Iterator[Visitor]:
    """Open a context with all its hooks; without its policy when that is to be no wall."""
    context = chromium.new_context(bypass_csp=bypass_csp)
    context.set_default_timeout(60_000)
    detector = Detector(context)
    page = context.new_page()
    watched = watch(page)
    watched.allow("the server responded with a status of 4")
    try:
        yield Visitor(house, page, watched, detector)
    finally:
        context.close()


def missing_in(text: str, wanted: tuple[str, ...] | list[str]) -> list[str]:
    """List what a text does not contain."""
    return [each for each in wanted if lines(each) not in text]
