"""A Chromium driven through Playwright, and a watch over what its pages complain of.

The browser is the machine's own (TILLER_CHROMIUM, or Debian's /usr/bin/chromium): nothing is
downloaded. Whoever opens a page through `watch` reads `complaints` at the end and finds every
console message, error, breach of the content security policy and failed request of that page.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, sync_playwright

ARGUMENTS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
)
# A page that is left closes its stream, and a download takes its address from the page.
LEFT_BY_THE_PAGE: Final = "net::ERR_ABORTED"
LISTENER: Final = """
document.addEventListener("securitypolicyviolation", (event) => window.tillerBreach(
  `${event.effectiveDirective} blocked ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`,
));
window.tillerMessages = 0;
document.addEventListener("htmx:sseMessage", () => { window.tillerMessages += 1; });
"""


def executable() -> str:
    """Give the path of this machine's Chromium, whether or not there is one."""
    return os.environ.get("TILLER_CHROMIUM") or "/usr/bin/chromium"


def why_not() -> str | None:
    """Say why no browser can be driven here, or give None where one can."""
    path = executable()
    if shutil.which(path) is None:
        return f"there is no Chromium at {path}; apt install chromium, or set TILLER_CHROMIUM"
    return None


@contextmanager
def launched() -> Iterator[Browser]:
    """Start Chromium and stop it at the end; this thread can run no other loop meanwhile."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable(), args=list(ARGUMENTS), chromium_sandbox=False
        )
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page with what it complained of, in order; `allowed` holds parts of expected complaints."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)

    def allow(self, part: str) -> None:
        """Expect complaints that contain this text from now on."""
        self.allowed.append(part)

    def note(self, complaint: str) -> None:
        """Write a complaint down, unless the test expects it."""
        if not any(part in complaint for part in self.allowed):
            self.complaints.append(complaint)


def watch(page: Page) -> Watched:
    """Record whatever goes wrong in a page; call it before the page is sent anywhere."""
    watched = Watched(page)

    def console(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning", "assert"}:
            place = message.location.get("url", "")
            watched.note(f"console {message.type}: {message.text} ({place})")

    def failed(request: Request) -> None:
        if request.failure != LEFT_BY_THE_PAGE:
            watched.note(f"request failed: {request.method} {request.url}: {request.failure}")

    def answered(response: Response) -> None:
        if response.status >= 500:
            watched.note(f"answer {response.status}: {response.request.method} {response.url}")

    def breach(_source: Any, text: str) -> None:
        watched.note(f"content security policy: {text}")

    page.expose_binding("tillerBreach", breach)
    page.add_init_script(LISTENER)
    page.on("console", console)
    page.on("pageerror", lambda error: watched.note(f"page error: {error}"))
    page.on("requestfailed", failed)
    page.on("response", answered)
    return watched


def sign_in(page: Page, base_url: str, key: str) -> None:
    """Log in at the dashboard as a person does; raises when the key is not taken."""
    page.goto(f"{base_url}/admin/login")
    page.get_by_label("Admin key").fill(key)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(lambda address: not address.split("?")[0].endswith("/admin/login"))
