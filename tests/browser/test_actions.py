"""Every act of the dashboard, clicked as a person does, and the row it leaves in the audit log."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.admin.routes import NEEDS
from tests.browser.acting import DRIVEN, SAFE, Person, acting, drives, expect_audit
from tests.browser.served import Scene, wait_for
from tests.browser.visits import Look, context_for

pytestmark = pytest.mark.slow

LOOK = Look("light", 1280)
SECRET = re.compile(r"sk_live_[0-9a-f]{72}")
ENDS_TIMEOUT = 60_000


@pytest.fixture
def person(chromium: Browser, scene: Scene, request: pytest.FixtureRequest) -> Iterator[Person]:
    """An admin at the dashboard."""
    with acting(context_for(chromium, scene, LOOK), request.node.name) as person:
        yield person


@pytest.fixture
def stranger(chromium: Browser, scene: Scene, request: pytest.FixtureRequest) -> Iterator[Person]:
    """Somebody who has not logged in."""
    with acting(context_for(chromium, scene, LOOK, role=None), request.node.name) as person:
        yield person


def test_every_act_is_driven() -> None:
    unsafe = {route for route in NEEDS if route.split(" ")[0] not in SAFE}
    assert frozenset().union(*DRIVEN.values()) == unsafe, "give each act a test with @drives"


@drives("POST /admin/login", "POST /admin/logout")
def test_logging_in_with_a_wrong_key_then_the_right_one_and_out(
    stranger: Person, scene: Scene
) -> None:
    page = stranger.page
    page.goto("/admin/accounts")
    expect(page.get_by_role("heading", level=1)).to_have_text("Log in to the dashboard")
    expect(page.get_by_label("Admin key")).to_be_focused()
    stranger.watched.allow("status of 403")
    page.keyboard.type("sk_live_" + "0" * 72)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("This key does not open the dashboard")
    expect(page.get_by_label("Admin key")).to_have_value("")
    page.get_by_label("Admin key").fill(scene.keys["admin"])
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Accounts")
    expect_audit(page, "login_failed", "nobody", "from 127.0.0.1", "reason", "unknown key")
    expect_audit(page, "login", "local admin", "logged in", "from 127.0.0.1")
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Log in to the dashboard")
    page.goto("/admin/accounts")
    expect(page.get_by_role("heading", level=1)).to_have_text("Log in to the dashboard")
    log = scene.desk.page("/admin/audit?action=logout")
    assert "logged out" in log.partition("<tbody>")[2]


@drives("POST /admin/jobs/{job_id}/cancel")
def test_a_job_is_cancelled_after_a_second_thought(person: Person, scene: Scene) -> None:
    page, job = person.page, scene.submit("Wrong strengths", requests=400)
    page.goto(f"/admin/jobs/{job}")
    box = page.locator(".confirm-box")
    page.get_by_text("Cancel…").click()
    expect(box).to_be_visible()
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()
    assert scene.client.get_job(job)["status"] in {"queued", "in_progress"}
    page.get_by_text("Cancel…").click()
    page.get_by_role("button", name="Cancel this Job").click()
    expect(page.get_by_role("status").first).to_contain_text("The cancel was asked for")
    state = page.locator("[sse-swap=state] .badge")
    expect(state).to_have_text("cancelled", timeout=ENDS_TIMEOUT)
    expect(page.get_by_text("Cancel…")).to_be_hidden()
    row = expect_audit(page, "job.cancel", "cancelled a Job", target=job)
    expect(row.locator("del").first).to_have_text(re.compile("queued|in_progress"))
    expect(row.locator("ins").first).to_have_text("cancelling")


@drives("POST /admin/jobs/cancel")
def test_jobs_that_match_a_filter_are_counted_and_then_cancelled(
    person: Person, scene: Scene
) -> None:
    page = person.page
    jobs = [scene.submit(f"Bulk mistake {number}", requests=400) for number in range(3)]
    page.goto("/admin/jobs")
    page.get_by_label("Name or id").fill("bulk mistake")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tbody tr")).to_have_count(3)
    page.get_by_role("link", name="Cancel all of these…").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Cancel 3 Jobs?")
    expect(page.locator(".facts")).to_contain_text("bulk mistake")
    page.get_by_role("link", name="Leave them").click()
    expect(page.locator("tbody tr")).to_have_count(3)
    states = {scene.client.get_job(job)["status"] for job in jobs}
    assert states <= {"queued", "in_progress"}
    page.get_by_role("link", name="Cancel all of these…").click()
    page.get_by_role("button", name="Cancel 3 Jobs").click()
    expect(page.get_by_role("status").first).to_contain_text("3 Jobs cancelled")
    states = {scene.client.get_job(job)["status"] for job in jobs}
    assert states <= {"cancelling", "cancelled"}
    expect_audit(page, "jobs.cancel", "cancelled Jobs", "bulk mistake", "jobs 3", "until")


@drives("POST /admin/workers/{worker_id}/drain", "POST /admin/workers/{worker_id}/undrain")
def test_a_worker_is_drained_and_kept_after_all(person: Person) -> None:
    page = person.page
    page.goto("/admin/workers")
    # Asked in time: a worker that has heard of the drain in a heartbeat goes.
    with stopped(worker_pid(page)):
        page.get_by_role("button", name="Drain the worker").click()
        expect(page.get_by_role("status").first).to_contain_text("leases nothing more")
        page.get_by_role("button", name="Take the drain").click()
        expect(page.get_by_role("button", name="Drain the worker")).to_be_visible()
    expect_audit(page, "worker.drain", "drained a worker", "drain requested false → true")
    expect_audit(page, "worker.undrain", "took a drain back", "drain requested true → false")


def worker_pid(page: Page) -> int:
    """Read the number of the worker's process off the page."""
    found = re.search(r"pid (\d+)", page.locator("tbody tr").first.inner_text())
    assert found is not None
    return int(found[1])


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keep a process from running for a moment."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@drives("POST /admin/accounts")
def test_an_account_is_created(person: Person) -> None:
    page = person.page
    page.goto("/admin/accounts")
    page.locator("#f-new-name").fill("Phonetics & Phonology")
    page.get_by_role("button", name="Create the account").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Phonetics & Phonology")
    expect(page.get_by_role("status").first).to_contain_text("The account was created")
    expect(page.get_by_text("Nobody can use this account yet.")).to_be_visible()
    expect_audit(page, "account.create", "created an account", "name Phonetics & Phonology")


@drives("POST /admin/accounts/{account}/tokens/ask", "POST /admin/accounts/{account}/tokens")
def test_tokens_are_granted_and_taken_back_when_asked_twice(person: Person, scene: Scene) -> None:
    page, account = person.page, scene.desk.make_account("Tokens twice")
    page.goto(f"/admin/accounts/{account}")
    ask_for_tokens(page, "Grant", "250 000", "the second half of the study")
    expect(page.get_by_role("heading", level=1)).to_have_text("Grant 250,000 tokens?")
    expect(page.locator("tbody tr").first).to_contain_text(re.compile(r"Balance\s*0\s*250,000"))
    assert ">250,000<" not in scene.desk.page(f"/admin/accounts/{account}")
    page.get_by_role("button", name="Grant 250,000 tokens").click()
    expect(page.get_by_role("status").first).to_contain_text("The tokens were granted.")
    expect(page.locator(".tile").first).to_contain_text("250,000")
    ask_for_tokens(page, "Take back", "50,000", "granted too much")
    page.get_by_role("button", name="Take back 50,000 tokens").click()
    expect(page.get_by_role("status").first).to_contain_text("The tokens were taken back.")
    expect(page.locator(".tile").first).to_contain_text("200,000")
    expect_audit(page, "tokens.grant", "balance 0 → 250,000", "the second half", target=account)
    expect_audit(page, "tokens.reversal", "balance 250,000 → 200,000", "granted too much")


def ask_for_tokens(page: Page, kind: str, amount: str, reason: str) -> None:
    """Fill in the first of the two forms."""
    form = page.locator("form[action$='/tokens/ask']")
    form.get_by_label("What").select_option(kind)
    form.get_by_label("Tokens").fill(amount)
    form.get_by_label("Reason").fill(reason)
    form.get_by_role("button", name="Show what will happen").click()


@drives("POST /admin/accounts/{account}/keys", "POST /admin/accounts/{account}/keys/{key}/revoke")
def test_a_key_is_shown_once_works_and_is_revoked(person: Person, scene: Scene) -> None:
    page, account = person.page, scene.desk.make_account("Keys once")
    page.goto(f"/admin/accounts/{account}")
    page.get_by_text("New key", exact=True).click()
    page.get_by_label("Name").fill("notebook on gpu-3")
    page.get_by_label("admin", exact=True).check()
    page.get_by_label("Role at the dashboard").select_option("operator")
    page.get_by_role("button", name="Create the key").click()
    secret = page.locator(".secret").inner_text()
    assert SECRET.fullmatch(secret)
    assert status_of(scene, secret) == 200
    page.reload()
    expect(page.get_by_text("No second key was made")).to_be_visible()
    assert secret not in page.content()
    page.get_by_role("link", name="Back to the account").click()
    row = page.locator("tr", has_text="notebook on gpu-3")
    expect(row).to_contain_text(f"sk_live_…{secret[-4:]}")
    expect(row).to_contain_text("dashboard: operator")
    assert secret not in page.content()
    row.get_by_text("Revoke", exact=True).click()
    row.get_by_role("button", name="Revoke for good").click()
    expect(page.get_by_role("status").first).to_contain_text("The key was revoked.")
    expect(row.locator(".badge")).to_have_text("revoked")
    assert status_of(scene, secret) == 401
    made = expect_audit(page, "key.create", "created a key", "notebook on gpu-3", secret[-4:])
    expect(made).to_contain_text("role operator")
    assert secret not in page.content()
    expect_audit(page, "key.revoke", "revoked a key", "revoked false → true", account)


def status_of(scene: Scene, key: str) -> int:
    """Ask the API for something with a key."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{scene.base}/v1/usage", headers=headers, trust_env=False).status_code


@drives("POST /admin/accounts/{account}/holds/stop", "POST /admin/accounts/{account}/holds/allow")
def test_holds_are_stopped_with_a_reason_and_allowed_again(person: Person, scene: Scene) -> None:
    page, account = person.page, scene.desk.make_account("Holds")
    page.goto(f"/admin/accounts/{account}")
    page.locator("form[action$='/holds/stop']").get_by_label("Reason").fill("balance looks odd")
    page.get_by_role("button", name="Stop Holds").click()
    stopped_because = page.locator("[sse-swap=stopped]")
    expect(stopped_because).to_contain_text("balance looks odd")
    page.goto("/admin/accounts?name=Holds")
    expect(page.locator("tbody tr").first.locator(".badge")).to_have_text("stopped")
    page.goto(f"/admin/accounts/{account}")
    page.get_by_role("button", name="Allow Holds again").click()
    expect(page.get_by_role("status").first).to_contain_text("may place Holds again")
    expect(stopped_because).not_to_contain_text("balance looks odd")
    reason = "holds stopped reason"
    expect_audit(page, "holds.stop", "stopped Holds", f"{reason} balance looks odd")
    expect_audit(page, "holds.allow", "allowed Holds", f"{reason} balance looks odd → none")


@drives("POST /admin/system/invariants")
def test_invariants_are_run_while_a_job_runs(person: Person) -> None:
    page = person.page
    panel = page.locator("section[aria-labelledby=invariants]")
    person.watched.allow("status of 409")  # while the hourly run is under way

    def all_true() -> bool:
        page.goto("/admin/system")
        with page.expect_navigation(timeout=ENDS_TIMEOUT):
            page.get_by_role("button", name="Check them now").click()
        said = panel.locator(".badge").first
        return said.count() == 1 and said.inner_text() == "all true"

    # On a busy machine a rule may have no time to finish.
    wait_for(all_true, "a run of all rules", ENDS_TIMEOUT / 1000)
    expect(page.get_by_role("status").first).to_be_visible()
    expect(panel).to_contain_text("by local admin")
    expect_audit(page, "invariants.run", "ran the invariants", "broken 0")
