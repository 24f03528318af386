"""Who may do what: every route, every role, every way another site could try; and the headers."""

import pytest

from app.admin.dashboard import HEADERS
from tests.admin.people import ROLES, SAME_ORIGIN, Dashboard
from tests.admin.routes import ANYBODY, NEEDS, STREAMS, address, routes

UNSAFE = [route for route in routes() if not route.startswith("GET ")]
# What a browser sends with a form, a script or a frame of another site, and what others forge.
FOREIGN = {
    "another site": {"sec-fetch-site": "cross-site", "origin": "https://evil.example"},
    "another site without origin": {"sec-fetch-site": "cross-site"},
    "a sister site": {"sec-fetch-site": "same-site", "origin": "http://sister.testserver"},
    "typed by hand": {"sec-fetch-site": "none"},
    "unknown value": {"sec-fetch-site": "same-origin-ish"},
    "empty value": {"sec-fetch-site": ""},
    "same origin twice": {"sec-fetch-site": "same-origin, cross-site"},
    "no fetch metadata": {},
    "old browser": {"origin": "https://evil.example"},
    "sandboxed frame": {"origin": "null"},
    "another port": {"origin": "http://testserver:81"},
    "our name inside": {"origin": "http://testserver.evil.example"},
    "our name as user": {"origin": "http://testserver@evil.example"},
    "origin that lies about the site": {
        "origin": "http://testserver",
        "sec-fetch-site": "cross-site",
    },
}


def state_of(dashboard: Dashboard) -> object:
    """Read what no refused request may change."""
    return dashboard.number(
        """
        SELECT array[(SELECT count(*) FROM accounts)::text, (SELECT count(*) FROM api_keys)::text,
            (SELECT count(*) FROM audit_log)::text, (SELECT count(*) FROM entries)::text,
            (SELECT count(*) FROM invariant_runs)::text,
            (SELECT count(*) FROM admin_sessions WHERE ended_at IS NULL)::text,
            (SELECT string_agg(accounts::text, ',' ORDER BY id) FROM accounts),
            (SELECT string_agg(api_keys::text, ',' ORDER BY id) FROM api_keys)] AS state
        """
    )


def test_every_route_has_its_role():
    assert set(routes()) == set(NEEDS)
    assert set(NEEDS) >= STREAMS


def test_nobody_gets_past_the_login_page_without_a_session(dashboard: Dashboard):
    browser = dashboard.browser()
    browser.client.cookies.set("tiller_session", "x" * 43, path="/admin")
    before = state_of(dashboard)
    for route in routes():
        if NEEDS[route] == ANYBODY:
            continue
        method, path = address(route)
        answer = browser.client.request(method, path, headers=SAME_ORIGIN)
        assert answer.status_code == 303, route
        assert answer.headers["location"].startswith("/admin/login"), route
        assert "set-cookie" not in answer.headers, route
    assert state_of(dashboard) == before


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_do_what_it_is_for_and_nothing_else(dashboard: Dashboard, role):
    browser = dashboard.browser(role)
    before = state_of(dashboard)
    refused = []
    for route in routes():
        needed = NEEDS[route]
        if needed == ANYBODY or route == "POST /admin/logout" or route in STREAMS:
            continue
        method, path = address(route)
        answer = browser.client.request(method, path, headers=SAME_ORIGIN)
        assert answer.status_code < 500, f"{route}: {answer.text}"
        may = ROLES.index(role) >= ROLES.index(needed)
        if may and method == "GET":
            assert answer.status_code in (200, 404), f"{role} {route}: {answer.status_code}"
        elif may:
            assert answer.status_code in (303, 400, 404), f"{role} {route}: {answer.status_code}"
            assert "/admin/login" not in answer.headers.get("location", ""), route
        else:
            refused.append(route)
            assert answer.status_code == 403, f"{role} {route}: {answer.status_code}"
            assert f"This needs the role {needed}" in answer.text, route
    if role == "read-only":
        assert state_of(dashboard) == before
        assert set(refused) >= set(UNSAFE) - {"POST /admin/login", "POST /admin/logout"}
    assert (role == "admin") == (not refused)


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN.keys())
def test_no_other_site_can_make_a_browser_act(dashboard: Dashboard, headers: dict[str, str]):
    browser = dashboard.browser("admin")
    before = state_of(dashboard)
    for route in UNSAFE:
        method, path = address(route)
        answer = browser.client.request(
            method, path, headers=headers, data={"key": dashboard.keys["admin"], "name": "x"}
        )
        assert answer.status_code == 403, route
        assert "nothing was done" in answer.text, route
        assert "set-cookie" not in answer.headers, route
    assert state_of(dashboard) == before


@pytest.mark.parametrize(
    "headers",
    [SAME_ORIGIN, {"origin": "http://testserver"}],
    ids=["fetch metadata", "origin of an old browser"],
)
def test_a_page_of_ours_can_act(dashboard: Dashboard, headers: dict[str, str]):
    browser = dashboard.browser("operator")
    answer = browser.client.post("/admin/system/invariants", headers=headers)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/admin/system?said=ran#invariants"


def test_another_site_can_neither_embed_nor_fetch_a_page(dashboard: Dashboard):
    browser = dashboard.browser("admin")
    for mode in ("cors", "no-cors", "websocket", ""):
        headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": mode}
        assert browser.get("/admin/accounts", **headers).status_code == 403
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert browser.get("/admin/accounts", **followed).status_code == 200


def test_every_answer_carries_the_headers_that_protect_it(dashboard: Dashboard):
    for browser in (dashboard.browser(), dashboard.browser("admin")):
        asked = [address(route) for route in routes() if route not in STREAMS]
        extra = [("GET", "/admin/nothing"), ("PUT", "/admin/login"), ("POST", "/admin/nothing")]
        for method, path in [*asked, *extra]:
            answer = browser.client.request(method, path, headers=SAME_ORIGIN)
            for name, value in HEADERS.items():
                assert answer.headers.get_list(name) == [value], f"{method} {path}: {name}"
            assert answer.headers["x-request-id"].startswith("req_")
            if "/static/" not in path:
                assert answer.headers["cache-control"] == "no-store", f"{method} {path}"


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere():
    policy = dict(
        part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    for name in ("script-src", "style-src", "connect-src", "form-action"):
        assert policy[name] == "'self'", name
    assert policy["img-src"] == "'self' data:"


def test_an_unknown_page_and_a_wrong_method_are_answered_with_a_page(dashboard: Dashboard):
    browser = dashboard.browser("admin")
    missing = browser.get("/admin/<script>alert(1)</script>")
    assert missing.status_code == 404
    assert missing.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script>alert" not in missing.text
    wrong = browser.client.put("/admin/login", headers=SAME_ORIGIN)
    assert wrong.status_code == 405
    assert "POST" in wrong.headers["allow"] or "GET" in wrong.headers["allow"]


def test_the_api_beside_the_dashboard_keeps_its_own_errors(dashboard: Dashboard):
    browser = dashboard.browser("admin")
    for path in ("/v1/jobs", "/administration", "/v1/admin"):
        answer = browser.get(path)
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["type"]
        assert "content-security-policy" not in answer.headers


def test_the_session_cookie_opens_nothing_of_the_api(dashboard: Dashboard):
    browser = dashboard.browser("admin")
    token = browser.client.cookies["tiller_session"]
    answer = browser.client.get("/v1/jobs", headers={"cookie": f"tiller_session={token}"})
    assert answer.status_code == 401


def test_static_files_are_named_by_their_content_and_kept_for_a_year(dashboard: Dashboard):
    browser = dashboard.browser()
    page = browser.get("/admin/login").text
    address = page.split('rel="stylesheet" href="')[1].split('"')[0]
    answer = browser.get(address)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/css; charset=utf-8"
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    again = browser.get(address, **{"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert browser.get("/admin/static/style.css").headers["cache-control"] == "no-cache"
    for name in ("../access.py", "%2e%2e/access.py", "vendor", "nothing.css", "..%2fpages.py"):
        assert browser.get(f"/admin/static/{name}").status_code == 404, name
