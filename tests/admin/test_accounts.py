"""Pages of accounts and every act there: what changes, what is written down, what counts once."""

import re
import threading
from datetime import UTC, datetime, timedelta
from itertools import combinations_with_replacement
from uuid import UUID, uuid4

import pytest

from app.accounts.accounts import create_account, create_key
from app.admin.access import Operator
from app.admin.audit import record
from app.errors import InsufficientTokensError, UnavailableError
from app.jobs.invariants import check_invariants
from app.kit.ids import new_uuid, parse_id, public_id
from app.ledger.holds import grant_tokens
from tests.admin.pages.running import wait_until
from tests.admin.people import Dashboard, form_token
from tests.fixtures.api import PEPPER
from tests.fixtures.builders import Builders


def an_account(dashboard: Dashboard, *, balance: int = 1000, name: str = "the lab") -> str:
    with dashboard.database.transaction() as conn:
        account_id = create_account(conn, name)
        if balance:
            grant_tokens(conn, account_id, balance, "opening grant")
    return public_id("acct", account_id)


def balance_of(dashboard: Dashboard, ref: str) -> int:
    account_id = parse_id("acct", ref)
    balance: int = dashboard.number("SELECT balance FROM accounts WHERE id = %s", account_id)
    return balance


def sums_are_right(dashboard: Dashboard) -> None:
    with dashboard.database.transaction() as conn:
        assert check_invariants(conn) == []


def test_an_account_is_created_once_however_often_its_form_is_sent(dashboard: Dashboard):
    browser = dashboard.browser("admin")
    token = form_token(browser.get("/admin/accounts").text)
    first = browser.post("/admin/accounts", name=" new lab ", form_token=token)
    assert re.fullmatch(
        r"/admin/accounts/acct_[0-9a-f]{32}\?said=created", first.headers["location"]
    )
    assert browser.post("/admin/accounts", name="new lab", form_token=token).status_code == 303
    assert dashboard.number("SELECT count(*) FROM accounts WHERE name = 'new lab'") == 1
    (entry,) = dashboard.audit("account.create")
    assert entry.after == {"name": "new lab"}
    assert (entry.name, entry.role) == ("admin", "admin")
    page = browser.get(first.headers["location"])
    assert "The account was created" in page.text
    assert "No keys" in page.text


def test_accounts_are_listed_newest_first_page_by_page(dashboard: Dashboard):
    for number in range(60):
        an_account(dashboard, balance=0, name=f"account {number:02}")
    browser = dashboard.browser("read-only")
    seen: list[str] = []
    sizes: list[int] = []
    path: str | None = "/admin/accounts?name="
    while path is not None:
        page = browser.get(path).text
        names = re.findall(r">account (\d\d)</a>", page)
        seen, sizes = seen + names, [*sizes, len(names)]
        older = re.search(r'href="([^"]*after=acct_[0-9a-f]{32}[^"]*)"', page)
        path = None if older is None else older[1].replace("&amp;", "&")
    names_by_id = "SELECT array_agg(right(name, 2) ORDER BY id DESC) FROM accounts WHERE name ~ %s"
    assert seen == dashboard.number(names_by_id, "account ")
    assert sizes == [50, 10]
    assert len(set(seen)) == 60
    found = browser.get("/admin/accounts?name=COUNT 07").text
    assert "account 07" in found
    assert "account 08" not in found
    assert "No account of that name" in browser.get("/admin/accounts?name=nobody").text


def test_a_grant_is_shown_first_and_counts_once(dashboard: Dashboard):
    ref = an_account(dashboard)
    browser = dashboard.browser("admin")
    asked = browser.post(
        f"/admin/accounts/{ref}/tokens/ask", kind="grant", amount="2,500", note="for the study"
    )
    assert asked.status_code == 200
    assert "1,000" in asked.text
    assert "3,500" in asked.text
    assert balance_of(dashboard, ref) == 1000
    assert dashboard.audit("tokens.grant") == []
    fields = {
        "kind": "grant",
        "amount": "2500",
        "note": "for the study",
        "form_token": form_token(asked.text),
    }
    first = browser.post(f"/admin/accounts/{ref}/tokens", **fields)
    assert first.headers["location"] == f"/admin/accounts/{ref}?said=grant"
    second = browser.post(f"/admin/accounts/{ref}/tokens", **fields)
    assert second.headers["location"] == f"/admin/accounts/{ref}?said=again"
    assert "it counted once" in browser.get(second.headers["location"]).text
    assert balance_of(dashboard, ref) == 3500
    (entry,) = dashboard.audit("tokens.grant")
    assert entry.target == ref
    assert entry.before == {"balance": 1000, "held": 0}
    assert entry.after == {"balance": 3500, "held": 0, "amount": 2500, "note": "for the study"}
    sums_are_right(dashboard)


def test_clicks_at_the_same_moment_grant_once(dashboard: Dashboard):
    ref = an_account(dashboard)
    browsers = [dashboard.browser("admin") for _ in range(4)]
    token, ready, answers = str(uuid4()), threading.Barrier(4), []

    def click(browser):
        ready.wait(10)
        answers.append(
            browser.post(
                f"/admin/accounts/{ref}/tokens",
                kind="grant",
                amount="7",
                note="once",
                form_token=token,
            )
        )

    threads = [threading.Thread(target=click, args=[browser]) for browser in browsers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    said = sorted(answer.headers["location"].rsplit("=", 1)[1] for answer in answers)
    assert said == ["again", "again", "again", "grant"]
    assert balance_of(dashboard, ref) == 1007
    assert len(dashboard.audit("tokens.grant")) == 1


ACTS = {
    "grant": ("/admin/accounts/{}/tokens", {"kind": "grant", "amount": "7", "note": "raced"}),
    "key": ("/admin/accounts/{}/keys", {"name": "raced", "scopes": ["vectors"]}),
    "account": ("/admin/accounts", {"name": "raced"}),
}


@pytest.mark.parametrize("acts", [*combinations_with_replacement(ACTS, 2)], ids=" and ".join)
def test_one_form_token_counts_once_whatever_two_forms_carry_it_at_once(
    dashboard: Dashboard, acts: tuple[str, str]
):
    token, answers = uuid4(), []

    def send(act: str, ref: str, browser) -> None:
        path, fields = ACTS[act]
        answers.append(browser.post(path.format(ref), **fields, form_token=str(token)))

    threads = [
        threading.Thread(target=send, args=[act, an_account(dashboard), dashboard.browser("admin")])
        for act in acts
    ]
    waiting = """
        SELECT count(*) FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND datname = current_database()
        """
    with dashboard.database.transaction() as conn:
        # Both forms are checked while this row is not there yet, and wait where they write theirs.
        record(conn, Operator(new_uuid(), new_uuid(), "olga", "admin"), "logout", "", token=token)
        for thread in threads:
            thread.start()
        wait_until(lambda: dashboard.number(waiting) == 2, "both forms to wait")
        conn.rollback()
    for thread in threads:
        thread.join(30)
    done = dashboard.number(
        """
        SELECT (SELECT count(*) FROM entries WHERE note = 'raced')
            + (SELECT count(*) FROM api_keys WHERE name = 'raced')
            + (SELECT count(*) FROM accounts WHERE name = 'raced') AS done
        """
    )
    written = dashboard.number("SELECT count(*) FROM audit_log WHERE form_token = %s", token)
    assert (done, written) == (1, 1)
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses[0] in (200, 303)
    assert statuses[1] in (303, 409)
    refused = [answer.text for answer in answers if answer.status_code == 409]
    assert all("it counts once" in text for text in refused)
    sums_are_right(dashboard)


def test_tokens_are_taken_back_up_to_what_is_available(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    account_id = builders.an_account(balance=1000)
    builders.a_job(account_id=account_id, requests=10)  # holds 10 x (5 + 4)
    ref = public_id("acct", account_id)
    browser = dashboard.browser("admin")
    too_many = {"kind": "reversal", "amount": "911", "note": "a mistake"}
    for step in ("/ask", ""):
        answer = browser.post(
            f"/admin/accounts/{ref}/tokens{step}", **too_many, form_token=str(uuid4())
        )
        assert answer.status_code == 409
        assert "910 available (1,000 less 90 held)" in answer.text
    assert balance_of(dashboard, ref) == 1000
    assert dashboard.audit("tokens.reversal") == []
    answer = browser.post(
        f"/admin/accounts/{ref}/tokens", **{**too_many, "amount": "910"}, form_token=str(uuid4())
    )
    assert answer.headers["location"].endswith("said=reversal")
    assert balance_of(dashboard, ref) == 90
    (entry,) = dashboard.audit("tokens.reversal")
    assert entry.before == {"balance": 1000, "held": 90}
    assert entry.after == {"balance": 90, "held": 90, "amount": 910, "note": "a mistake"}
    sums_are_right(dashboard)
    page = browser.get(f"/admin/accounts/{ref}").text
    assert "\N{MINUS SIGN}910" in page
    assert "of 90 granted" in page


@pytest.mark.parametrize(
    "fields",
    [
        {"amount": "0"},
        {"amount": "-5"},
        {"amount": "1.5"},
        {"amount": "1e6"},
        {"amount": "1000000000000001"},
        {"amount": "٣"},
        {"amount": ""},
        {"kind": "gift"},
        {"note": " "},
        {"note": "x" * 501},
        {"form_token": "x"},
        {"form_token": ""},
    ],
    ids=str,
)
def test_a_grant_that_makes_no_sense_is_refused(dashboard: Dashboard, fields: dict[str, str]):
    ref = an_account(dashboard)
    whole = {"kind": "grant", "amount": "5", "note": "why", "form_token": str(uuid4()), **fields}
    answer = dashboard.browser("admin").post(f"/admin/accounts/{ref}/tokens", **whole)
    assert answer.status_code == 400
    assert balance_of(dashboard, ref) == 1000
    assert dashboard.audit("tokens.grant") == []


def test_a_new_key_is_shown_once_and_works(dashboard: Dashboard):
    ref = an_account(dashboard)
    browser = dashboard.browser("admin")
    token = form_token(browser.get(f"/admin/accounts/{ref}").text)
    fields = {
        "name": "the notebook",
        "scopes": ["completions", "jobs:read"],
        "days": "30",
        "form_token": token,
    }
    page = browser.post(f"/admin/accounts/{ref}/keys", **fields)
    assert page.status_code == 200
    assert page.headers["cache-control"] == "no-store"
    (secret,) = set(re.findall(r"sk_live_[0-9a-f]{72}", page.text))
    jobs = browser.client.get("/v1/jobs", headers={"authorization": f"Bearer {secret}"})
    assert jobs.status_code == 200
    again = browser.post(f"/admin/accounts/{ref}/keys", **fields)
    assert "No second key was made" in again.text
    shown = (
        again.text + browser.get(f"/admin/accounts/{ref}").text + browser.get("/admin/audit").text
    )
    assert secret not in shown
    assert f"sk_live_…{secret[-4:]}" in shown
    (entry,) = dashboard.audit("key.create")
    assert entry.after == {
        "account": ref,
        "name": "the notebook",
        "scopes": ["completions", "jobs:read"],
        "role": None,
        "days": 30,
        "last4": secret[-4:],
    }
    life = "SELECT expires_at - created_at = interval '30 days' FROM api_keys WHERE name = %s"
    assert dashboard.number(life, "the notebook") is True


def test_an_admin_key_has_the_role_that_was_chosen_and_the_least_by_default(dashboard: Dashboard):
    ref = an_account(dashboard)
    browser = dashboard.browser("admin")
    for role in ("operator", ""):
        page = browser.post(
            f"/admin/accounts/{ref}/keys",
            name=f"role {role}",
            scopes=["admin"],
            role=role,
            form_token=str(uuid4()),
        )
        (secret,) = set(re.findall(r"sk_live_[0-9a-f]{72}", page.text))
        new = dashboard.browser()
        assert new.log_in(secret).status_code == 303
        assert f'<span class="role">{role or "read-only"}</span>' in new.get("/admin/accounts").text


@pytest.mark.parametrize(
    "fields", [{"scopes": []}, {"scopes": ["root"]}, {"role": "owner"}, {"days": "0"}], ids=str
)
def test_a_key_that_makes_no_sense_is_refused(dashboard: Dashboard, fields: dict[str, object]):
    ref = an_account(dashboard)
    whole = {"name": "n", "scopes": ["vectors"], "form_token": str(uuid4()), **fields}
    answer = dashboard.browser("admin").post(f"/admin/accounts/{ref}/keys", **whole)
    assert answer.status_code == 400
    assert dashboard.number("SELECT count(*) FROM api_keys") == 3


def test_a_key_is_revoked_with_its_sessions(dashboard: Dashboard):
    account_id, key_id = key_of(dashboard, "operator")
    other = dashboard.browser("operator")
    browser = dashboard.browser("admin")
    path = f"/admin/accounts/{account_id}/keys/{key_id}/revoke"
    answer = browser.post(path)
    assert answer.headers["location"] == f"/admin/accounts/{account_id}?said=revoked"
    assert other.get("/admin/accounts").status_code == 303
    assert browser.post(path).status_code == 404
    (entry,) = dashboard.audit("key.revoke")
    assert entry.target == key_id
    assert entry.before == {"revoked": False}
    assert entry.after == {"revoked": True, "account": account_id, "sessions_ended": 1}


def test_a_key_whose_time_is_over_is_shown_as_expired(dashboard: Dashboard):
    ref = an_account(dashboard)
    account_id = parse_id("acct", ref)
    assert account_id is not None
    hour = timedelta(hours=1)
    with dashboard.database.transaction() as conn:
        create_key(conn, account_id, PEPPER, name="old", expires_at=datetime.now(UTC) - hour)
        create_key(conn, account_id, PEPPER, name="new", expires_at=datetime.now(UTC) + hour)
        create_key(conn, account_id, PEPPER, name="for ever")
    page = dashboard.browser("read-only").get(f"/admin/accounts/{ref}").text
    rows = re.findall(
        r'<th scope="row">(old|new|for ever)</th>.*?</svg>(\w+)</span>', page, re.DOTALL
    )
    assert dict(rows) == {"for ever": "active", "new": "active", "old": "expired"}


def test_nobody_revokes_the_key_they_are_logged_in_with(dashboard: Dashboard):
    account_id, key_id = key_of(dashboard, "admin")
    browser = dashboard.browser("admin")
    answer = browser.post(f"/admin/accounts/{account_id}/keys/{key_id}/revoke")
    assert answer.status_code == 409
    assert browser.get("/admin/accounts").status_code == 200
    assert dashboard.audit("key.revoke") == []


def test_a_key_of_another_account_is_not_revoked(dashboard: Dashboard):
    ref = an_account(dashboard)
    _, key_id = key_of(dashboard, "operator")
    answer = dashboard.browser("admin").post(f"/admin/accounts/{ref}/keys/{key_id}/revoke")
    assert answer.status_code == 404
    assert dashboard.number("SELECT count(*) FROM api_keys WHERE revoked_at IS NOT NULL") == 0


def test_holds_are_stopped_and_allowed_again(dashboard: Dashboard):
    ref = an_account(dashboard)
    account_id = parse_id("acct", ref)
    builders = Builders(dashboard.database)
    browser = dashboard.browser("admin")
    assert browser.post(f"/admin/accounts/{ref}/holds/stop", reason="an audit").status_code == 303
    with pytest.raises(UnavailableError):
        builders.a_job(account_id=account_id)
    page = browser.get(f"/admin/accounts/{ref}").text
    assert "places no new Holds" in page
    assert "an audit" in page
    again = browser.post(f"/admin/accounts/{ref}/holds/stop", reason="another")
    assert again.status_code == 409
    assert browser.post(f"/admin/accounts/{ref}/holds/allow").status_code == 303
    assert builders.a_job(account_id=account_id).tokens_held == 27
    assert browser.post(f"/admin/accounts/{ref}/holds/allow").status_code == 409
    allowed, stopped = dashboard.audit("holds.allow")[0], dashboard.audit("holds.stop")[0]
    assert stopped.before == {"holds_stopped_reason": None}
    assert stopped.after == allowed.before == {"holds_stopped_reason": "an audit"}
    assert allowed.after == {"holds_stopped_reason": None}
    assert len(dashboard.audit("holds.stop")) == 1


def test_the_page_of_an_account_shows_what_it_holds(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    account_id = builders.an_account(balance=10_000, name="the lab")
    job = builders.a_job(account_id=account_id, requests=3)
    page = dashboard.browser("read-only").get(f"/admin/accounts/{public_id('acct', account_id)}")
    assert public_id("job", job.id) in page.text
    assert "10,000" in page.text
    assert "opening grant" in page.text
    assert "New key" not in page.text  # this role may not
    with pytest.raises(InsufficientTokensError):
        builders.a_job(account_id=account_id, requests=2000)


def test_the_ledger_is_read_page_by_page(dashboard: Dashboard):
    ref = an_account(dashboard, balance=0)
    account_id = parse_id("acct", ref)
    with dashboard.database.transaction() as conn:
        for number in range(60):
            assert account_id is not None
            grant_tokens(conn, account_id, 1 + number, f"grant number {number:02}")
    browser = dashboard.browser("read-only")
    seen: list[str] = []
    path: str | None = f"/admin/accounts/{ref}/ledger?kind=grants"
    while path is not None:
        page = browser.get(path).text
        seen += re.findall(r"grant number (\d\d)", page)
        older = re.search(r'href="([^"]*before=\d+)"', page)
        path = None if older is None else older[1].replace("&amp;", "&")
    assert seen == [f"{number:02}" for number in reversed(range(60))]


def key_of(dashboard: Dashboard, role: str) -> tuple[str, str]:
    with dashboard.database.transaction() as conn:
        row = conn.execute("SELECT id, account_id FROM api_keys WHERE role = %s", [role]).fetchone()
    assert row is not None
    key_id: UUID = row["id"]
    return public_id("acct", row["account_id"]), public_id("key", key_id)


def test_a_page_shows_text_of_people_as_text(dashboard: Dashboard):
    browser = dashboard.browser("admin")
    for payload in PAYLOADS:
        ref = an_account(dashboard, balance=100, name=payload)
        account_id = parse_id("acct", ref)
        with dashboard.database.transaction() as conn:
            assert account_id is not None
            create_key(conn, account_id, PEPPER, name=payload)
            grant_tokens(conn, account_id, 1, payload)
        browser.post(f"/admin/accounts/{ref}/holds/stop", reason=payload)
        asked = browser.post(
            f"/admin/accounts/{ref}/tokens/ask", kind="grant", amount="1", note=payload
        )
        pages = [
            browser.get(f"/admin/accounts/{ref}"),
            browser.get(f"/admin/accounts/{ref}/ledger"),
            browser.client.get("/admin/accounts", params={"name": payload}),
            browser.client.get(
                "/admin/audit", params={"target": payload, "key": payload, "action": payload}
            ),
            browser.get(f"/admin/audit?target={ref}"),
            browser.client.get("/admin/login", params={"next": payload}),
            asked,
        ]
        for page in pages:
            assert page.status_code == 200
            assert payload not in page.text, page.url
            assert not re.search(r"<(?:img|svg|iframe|object|embed)[^>]*\son\w+=", page.text)
            assert len(re.findall(r"<script\b", page.text)) == page.text.count("<script src=")


PAYLOADS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg onload=alert(1)>",
    "</title><script>alert(1)</script>",
    "</textarea><script>alert(1)</script>",
    "{{ 7 * 7 }}<b>",
    "{% raw %}<i>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    '" autofocus onfocus=alert(1) x="',
    "<a href=javascript:alert(1)>x</a>",
)
