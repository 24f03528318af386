"""Login, sessions and logout: cookies, fixation, expiry, revocation, limits, the log."""

from datetime import timedelta

import pytest

from app.accounts.accounts import revoke_key
from app.admin.access import local_path
from tests.admin.people import ROLES, Browser, Dashboard

COOKIE = "tiller_session"


def cookie_of(answer) -> dict[str, str]:
    """Split a Set-Cookie header into its parts."""
    parts = answer.headers["set-cookie"].split("; ")
    return {part.partition("=")[0].lower(): part.partition("=")[2] for part in parts}


def test_the_session_cookie_is_for_the_dashboard_alone_and_out_of_reach_of_scripts(
    dashboard: Dashboard,
):
    answer = dashboard.browser().log_in(dashboard.keys["operator"])
    assert answer.status_code == 303
    assert answer.headers["location"] == "/admin"
    cookie = cookie_of(answer)
    assert "httponly" in cookie
    assert cookie["samesite"].lower() == "strict"
    assert cookie["path"] == "/admin"
    assert "secure" not in cookie
    assert "domain" not in cookie
    assert len(cookie[COOKIE]) == 43  # 256 bits in base64


def test_over_https_the_cookie_is_secure(dashboard: Dashboard):
    browser = dashboard.browser(base="https://testserver")
    assert "secure" in cookie_of(browser.log_in(dashboard.keys["admin"]))


def test_behind_a_proxy_that_ends_tls_the_cookie_is_secure_when_the_setting_says_so(
    dashboard: Dashboard,
):
    before = dashboard.app.state.settings
    dashboard.app.state.settings = before.model_copy(update={"admin_https": True})
    try:
        assert "secure" in cookie_of(dashboard.browser().log_in(dashboard.keys["admin"]))
    finally:
        dashboard.app.state.settings = before


def test_only_a_digest_of_the_token_is_stored(dashboard: Dashboard):
    token = cookie_of(dashboard.browser().log_in(dashboard.keys["admin"]))[COOKIE]
    with dashboard.database.transaction() as conn:
        rows = conn.execute("SELECT admin_sessions::text AS row FROM admin_sessions").fetchall()
    assert len(rows) == 1
    assert token not in rows[0]["row"]
    assert token.encode().hex() not in rows[0]["row"]


@pytest.mark.parametrize("role", ROLES)
def test_a_key_of_each_role_opens_the_dashboard(dashboard: Dashboard, role):
    page = dashboard.browser(role).get("/admin/accounts")
    assert page.status_code == 200
    assert role in page.text


def test_without_a_session_a_page_leads_to_login_and_back(dashboard: Dashboard):
    browser = dashboard.browser()
    answer = browser.get("/admin/audit?action=login")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/admin/login?next=/admin/audit%3Faction%3Dlogin"
    login = browser.get(answer.headers["location"])
    assert 'name="next" value="/admin/audit?action=login"' in login.text
    after = browser.log_in(dashboard.keys["admin"], next="/admin/audit?action=login")
    assert after.headers["location"] == "/admin/audit?action=login"


@pytest.mark.parametrize(
    "elsewhere",
    [
        *("https://evil.example/admin", "//evil.example", "/\\evil.example", "/admin/../v1"),
        *("/admin/%2e%2e/v1/jobs", "/admin/.%2E/v1/jobs", "/admin/%2E./v1", "/admin/x/%2e%2e/.."),
        *("/admin\\@evil.example", "/admin/\tx", "/adminevil", "javascript:alert(1)", ""),
        *(
            "/admin/login?next=/admin",
            "/admin/logout",
            "/v1/jobs",
            "/admin/\nx",
            "/admin/" + "x" * 3000,
        ),
    ],
)
def test_login_leads_to_pages_of_the_dashboard_only(dashboard: Dashboard, elsewhere: str):
    assert local_path(elsewhere) == "/admin"
    if len(elsewhere) < 2000:
        answer = dashboard.browser().log_in(dashboard.keys["admin"], next=elsewhere)
        assert answer.headers["location"] == "/admin"


def test_a_link_from_another_site_opens_the_page_although_the_cookie_was_withheld(
    dashboard: Dashboard,
):
    answer = dashboard.browser().get(
        "/admin/accounts?name=a%22b",
        **{"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    )
    assert answer.status_code == 200
    assert 'content="0; url=/admin/accounts?name=a%22b"' in answer.text


@pytest.mark.parametrize(
    "key", ["", "nonsense", "sk_live_" + "0" * 72, "sk_live_" + "a" * 64 + "deadbeef", "é" * 50]
)
def test_a_wrong_key_begins_nothing_and_is_written_down(dashboard: Dashboard, key: str):
    answer = dashboard.browser().log_in(key)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    assert "does not open the dashboard" in answer.text
    (entry,) = dashboard.audit()
    assert (entry.action, entry.name, entry.address) == ("login_failed", "nobody", "testclient")
    assert dashboard.number("SELECT count(*) FROM admin_sessions") == 0


def test_a_key_without_the_scope_admin_is_refused_like_any_wrong_one(dashboard: Dashboard):
    answer = dashboard.browser().log_in(dashboard.a_key(scopes={"completions", "jobs:write"}))
    assert answer.status_code == 403
    (entry,) = dashboard.audit("login_failed")
    assert entry.after == {"reason": "no admin key"}


def test_no_page_and_no_log_repeats_the_key(dashboard: Dashboard):
    key = dashboard.a_key(scopes={"completions"})
    assert key not in dashboard.browser().log_in(key).text
    assert dashboard.number("SELECT string_agg(audit_log::text, ' ') FROM audit_log").find(key) < 0


def test_a_token_that_was_planted_before_login_is_not_taken_over(dashboard: Dashboard):
    browser = dashboard.browser()
    browser.client.cookies.set(COOKIE, "planted-by-somebody-else", path="/admin")
    token = cookie_of(browser.log_in(dashboard.keys["admin"]))[COOKIE]
    assert token != "planted-by-somebody-else"
    thief = dashboard.browser()
    thief.client.cookies.set(COOKIE, "planted-by-somebody-else", path="/admin")
    assert thief.get("/admin/accounts").status_code == 303


def test_a_second_login_ends_the_session_that_the_browser_had(dashboard: Dashboard):
    browser = dashboard.browser("operator")
    first = browser.client.cookies[COOKIE]
    assert browser.log_in(dashboard.keys["admin"]).status_code == 303
    assert browser.client.cookies[COOKIE] != first
    old = dashboard.browser()
    old.client.cookies.set(COOKIE, first, path="/admin")
    assert old.get("/admin/accounts").status_code == 303
    assert browser.get("/admin/accounts").status_code == 200


def test_logout_ends_the_session_for_good(dashboard: Dashboard):
    browser = dashboard.browser("admin")
    token = browser.client.cookies[COOKIE]
    answer = browser.post("/admin/logout")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/admin/login"
    assert cookie_of(answer)["max-age"] == "0"
    browser.client.cookies.set(COOKIE, token, path="/admin")
    assert browser.get("/admin/accounts").status_code == 303
    assert [entry.action for entry in dashboard.audit()] == ["logout", "login"]


@pytest.mark.parametrize(
    ("column", "age"),
    [
        ("last_seen_at = last_seen_at - %s", timedelta(hours=1, seconds=1)),
        ("expires_at = expires_at - %s", timedelta(hours=12, seconds=1)),
    ],
    ids=["idle", "old"],
)
def test_a_session_ends_when_it_is_idle_or_old(dashboard: Dashboard, column: str, age: timedelta):
    browser = dashboard.browser("admin")
    assert browser.get("/admin/accounts").status_code == 200
    with dashboard.database.transaction() as conn:
        conn.execute(f"UPDATE admin_sessions SET {column}", [age])  # type: ignore[arg-type]
    assert browser.get("/admin/accounts").status_code == 303


def test_every_page_keeps_the_session_from_being_idle(dashboard: Dashboard):
    browser = dashboard.browser("admin")
    with dashboard.database.transaction() as conn:
        conn.execute("UPDATE admin_sessions SET last_seen_at = now() - interval '59 minutes'")
    assert browser.get("/admin/accounts").status_code == 200
    idle = "SELECT now() - last_seen_at < interval '1 minute' FROM admin_sessions"
    assert dashboard.number(idle) is True


def test_a_live_stream_does_not_keep_the_session_from_being_idle(dashboard: Dashboard):
    browser = dashboard.browser("admin")
    with dashboard.database.transaction() as conn:
        conn.execute("UPDATE admin_sessions SET last_seen_at = now() - interval '59 minutes'")
    # A stream that ends at once: nobody has this Job.
    assert browser.get(f"/admin/live?page=job&job=job_{0:032x}").status_code == 404
    idle = "SELECT now() - last_seen_at > interval '58 minutes' FROM admin_sessions"
    assert dashboard.number(idle) is True


@pytest.mark.parametrize("end", ["revoked", "expired", "demoted"])
def test_what_ends_a_key_ends_its_sessions_at_once(dashboard: Dashboard, end: str):
    browser = dashboard.browser("operator")
    with dashboard.database.transaction() as conn:
        row = conn.execute("SELECT id, account_id FROM api_keys WHERE role = 'operator'").fetchone()
        assert row is not None
        if end == "revoked":
            assert revoke_key(conn, row["account_id"], row["id"])
        elif end == "expired":
            conn.execute("UPDATE api_keys SET expires_at = now() WHERE id = %s", [row["id"]])
        else:
            conn.execute("UPDATE api_keys SET role = 'read-only' WHERE id = %s", [row["id"]])
    if end == "demoted":
        assert browser.get("/admin/accounts").status_code == 200
        assert browser.post("/admin/system/invariants").status_code == 403
    else:
        assert browser.get("/admin/accounts").status_code == 303
        assert browser.log_in(dashboard.keys["operator"]).status_code == 403


def test_an_address_that_fails_too_often_must_wait_and_others_need_not(dashboard: Dashboard):
    browser = dashboard.browser()
    limit = dashboard.app.state.settings.admin_login_failures
    for _ in range(limit):
        assert browser.log_in("wrong").status_code == 403
    refused = browser.log_in(dashboard.keys["admin"])
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "900"
    assert "Too many failed logins" in refused.text
    assert "set-cookie" not in refused.headers
    assert len(dashboard.audit("login_failed")) == limit
    other = Browser(dashboard.app)
    other.client._transport.client = ("192.0.2.7", 1)  # type: ignore[attr-defined]
    assert other.log_in(dashboard.keys["admin"]).status_code == 303
    with dashboard.database.transaction() as conn:
        conn.execute("ALTER TABLE audit_log DISABLE TRIGGER USER")
        conn.execute("UPDATE audit_log SET at = at - interval '15 minutes'")
    assert browser.log_in(dashboard.keys["admin"]).status_code == 303


def test_an_api_key_in_the_header_opens_no_page(dashboard: Dashboard):
    answer = dashboard.browser().get(
        "/admin/accounts", authorization=f"Bearer {dashboard.keys['admin']}"
    )
    assert answer.status_code == 303


@pytest.mark.parametrize(
    ("page", "back"),
    [
        (
            "http://testserver/admin/jobs/job_1?said=cancelled",
            "/admin/jobs/job_1%3Fsaid%3Dcancelled",
        ),
        ("https://elsewhere.example/admin/jobs", "/admin/jobs"),
        ("https://elsewhere.example/login", "/admin"),
        ("http://[", "/admin"),
        ("", "/admin"),
    ],
)
def test_a_piece_of_a_page_without_a_session_sends_the_page_to_login_and_back(
    dashboard: Dashboard, page: str, back: str
):
    headers = {"hx-request": "true", "hx-current-url": page}
    answer = dashboard.browser().get(f"/admin/jobs/job_{0:032x}/samples", **headers)
    assert answer.status_code == 401
    assert answer.headers["hx-redirect"] == f"/admin/login?next={back}"
