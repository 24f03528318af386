"""Every page of the dashboard, where it is and what it shows; tests and screenshots walk it.

A route that is neither visited nor listed in NOT_PAGES makes a test fail.
"""

from dataclasses import dataclass
from typing import Final, Literal

from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser.served import LONG_REQUESTS, Scene, wait_for

Theme = Literal["light", "dark"]
CHART_TIMEOUT: Final = 80_000  # milliseconds; a chart has no point before a minute has ended

NOT_PAGES: Final = {
    "GET /admin/": "leads to /admin",
    "GET /admin/live": "the stream that pages follow",
    "GET /admin/static/{name:path}": "style, scripts and pictures of the pages",
    "GET /admin/jobs/{job_id}/files/{path:path}": "a download",
}


@dataclass(frozen=True, slots=True)
class Look:
    """How a page is looked at."""

    theme: Theme
    width: int

    def __str__(self) -> str:
        """Write it as part of a name."""
        return f"{self.theme}-{self.width}"


@dataclass(frozen=True, slots=True)
class Visit:
    """A page: its route, its address (with names of Jobs and accounts), a text that it shows."""

    name: str
    route: str
    path: str
    shows: str
    status: int = 200
    role: str | None = "admin"


LOOKS: Final = tuple(Look(theme, width) for theme in ("light", "dark") for width in (1280, 390))
VISITS: Final = (
    Visit("login", "GET /admin/login", "/admin/login", "Admin key", role=None),
    Visit("overview", "GET /admin", "/admin", "Long sweep over strengths"),
    Visit("jobs", "GET /admin/jobs", "/admin/jobs", "Newest first."),
    Visit("jobs-filtered", "GET /admin/jobs", "/admin/jobs?q=sweep", "Cancel all of these"),
    Visit("jobs-none", "GET /admin/jobs", "/admin/jobs?q=no+such+name", "No Job matches"),
    Visit(
        "jobs-cancel",
        "GET /admin/jobs/cancel",
        "/admin/jobs/cancel?status=unfinished",
        "What this would do",
    ),
    Visit("job-running", "GET /admin/jobs/{job_id}", "/admin/jobs/{running}", "in progress"),
    Visit("job-pairs", "GET /admin/jobs/{job_id}", "/admin/jobs/{pairs}", "happy minus sad"),
    Visit("job-errors", "GET /admin/jobs/{job_id}", "/admin/jobs/{errors}", "non_finite"),
    Visit("job-captures", "GET /admin/jobs/{job_id}", "/admin/jobs/{captures}", "activations"),
    Visit("job-cancelled", "GET /admin/jobs/{job_id}", "/admin/jobs/{cancelled}", "cancelled"),
    Visit(
        "requests",
        "GET /admin/jobs/{job_id}/requests",
        "/admin/jobs/{errors}/requests",
        "40 in this Job",
    ),
    Visit(
        "requests-none",
        "GET /admin/jobs/{job_id}/requests",
        "/admin/jobs/{pairs}/requests?status=errored",
        "No request matches",
    ),
    Visit(
        "request",
        "GET /admin/jobs/{job_id}/requests/{index}",
        "/admin/jobs/{pairs}/requests/1",
        "Steering vector: adds 4",
    ),
    Visit(
        "request-errored",
        "GET /admin/jobs/{job_id}/requests/{index}",
        "/admin/jobs/{errors}/requests/3",
        "non_finite_activations",
    ),
    Visit(
        "request-waiting",
        "GET /admin/jobs/{job_id}/requests/{index}",
        f"/admin/jobs/{{running}}/requests/{LONG_REQUESTS - 1}",
        "No text yet",
    ),
    Visit(
        "samples",
        "GET /admin/jobs/{job_id}/samples",
        "/admin/jobs/{pairs}/samples",
        "Baseline",
    ),
    Visit(
        "files", "GET /admin/jobs/{job_id}/files", "/admin/jobs/{captures}/files", "layer=3/part"
    ),
    Visit("workers", "GET /admin/workers", "/admin/workers", "passed"),
    Visit("models", "GET /admin/models", "/admin/models", "1 worker ready"),
    Visit("accounts", "GET /admin/accounts", "/admin/accounts", "Interpretability lab"),
    Visit("accounts-none", "GET /admin/accounts", "/admin/accounts?name=zz", "No account of that"),
    Visit("account", "GET /admin/accounts/{account}", "/admin/accounts/{local}", "local admin"),
    Visit("account-lab", "GET /admin/accounts/{account}", "/admin/accounts/{lab}", "notebook"),
    Visit(
        "account-stopped",
        "GET /admin/accounts/{account}",
        "/admin/accounts/{stopped}",
        "The owner left the institute.",
    ),
    Visit(
        "ledger", "GET /admin/accounts/{account}/ledger", "/admin/accounts/{local}/ledger", "settle"
    ),
    Visit(
        "ledger-grants",
        "GET /admin/accounts/{account}/ledger",
        "/admin/accounts/{lab}/ledger?kind=grants",
        "a year",
    ),
    Visit("audit", "GET /admin/audit", "/admin/audit", "stopped Holds"),
    Visit("audit-none", "GET /admin/audit", "/admin/audit?target=job_1", "Nothing of that kind"),
    Visit("system", "GET /admin/system", "/admin/system", "Invariants"),
    Visit("missing", "GET /admin", "/admin/nothing", "There is no page", status=404),
)


def context_for(
    chromium: Browser, scene: Scene, look: Look, *, role: str | None = "admin"
) -> BrowserContext:
    """Open a window of a person with this role; None for somebody who has not logged in."""
    return chromium.new_context(
        base_url=scene.base,
        viewport={"width": look.width, "height": 900},
        color_scheme=look.theme,
        storage_state=None if role is None else scene.sessions[role],
    )


def settle(page: Page, *, charts: bool = False) -> None:
    """Wait until a page has everything that it asks for after loading."""
    expect(page.locator("[hx-trigger] > .loading")).to_have_count(0)
    if page.locator("[sse-connect]").count():
        # Not wait_for_function: it polls with eval, which the pages' policy forbids.
        wait_for(lambda: page.evaluate("window.tillerMessages ?? 1") > 0, "the first live text")
    if charts:
        expect(page.locator("[data-plot] canvas")).to_have_count(2, timeout=CHART_TIMEOUT)
