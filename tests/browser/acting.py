"""What tests of acts share: the routes that a test drives, and the row of an act in the log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, Locator, Page, Request, expect
from starlette.routing import Route

from app.admin.router import router
from tests.browser.chromium import Watched, watch

SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
DRIVEN: Final[dict[str, frozenset[str]]] = {}  # name of a test -> the unsafe routes it drives
Test = TypeVar("Test", bound=Callable[..., None])


def drives(*routes: str) -> Callable[[Test], Test]:
    """Say which unsafe routes a test drives by clicking; it fails unless exactly those are sent."""

    def mark(test: Test) -> Test:
        DRIVEN[test.__name__] = frozenset(routes)
        return test

    return mark


def route_of(method: str, url: str) -> str:
    """Give method and template of the route that answers a request."""
    path = urlsplit(url).path
    for route in router.routes:
        if not isinstance(route, Route) or method not in (route.methods or ()):
            continue
        if route.path_regex.match(path):
            return f"{method} {route.path}"
    return f"{method} {path}, which has no route"


@contextmanager
def acting(context: BrowserContext, test: str) -> Iterator["Person"]:
    """Give a person in a new window, who sends what the test says and complains of nothing."""
    person = Person(context.new_page())
    try:
        yield person
    finally:
        context.close()
    assert person.sent == DRIVEN[test]
    assert person.watched.complaints == []


@dataclass
class Person:
    """Somebody at the dashboard, and the unsafe requests that their browser has sent."""

    page: Page
    watched: Watched = field(init=False)
    sent: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Watch the page from the start."""
        self.watched = watch(self.page)
        self.page.on("request", self._note)

    def _note(self, request: Request) -> None:
        if request.method not in SAFE:
            self.sent.add(route_of(request.method, request.url))


def expect_audit(page: Page, action: str, *texts: str, target: str = "") -> Locator:
    """Find the newest act of this kind in the audit log and see that its row holds the texts."""
    page.goto(f"/admin/audit?action={action}&target={target}")
    row = page.locator("tbody tr").first
    for text in texts:
        expect(row).to_contain_text(text)
    return row
