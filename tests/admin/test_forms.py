"""Forms: what is not a small, flat, URL-encoded form is refused with a page that says why."""

import asyncio
from typing import Any

import pytest

from app.kit.db import Database
from tests.admin.people import SAME_ORIGIN, Dashboard

FORM = {"content-type": "application/x-www-form-urlencoded", **SAME_ORIGIN}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"name=" + b"a" * 70_000, 413, "more than 65536 bytes"),
        (b"name=", 400, "name is empty"),
        (b"name=a&name=b", 400, "name was sent 2 times"),
        (b"name=" + b"a" * 201, 400, "at most 200 are allowed"),
        (b"name=%00", 400, "U+0000"),
        (b"name=%ff", 400, "not UTF-8"),
        (b"name=\xff", 400, "not UTF-8"),
        (b"a=1&" * 101, 400, "more than 100 fields"),
        (b"name=ok&form_token=nonsense", 400, "form_token is not one of ours"),
        (b"", 400, "name is empty"),
    ],
    ids=lambda value: value[:20].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_a_form_that_is_not_one_is_refused(dashboard: Dashboard, body: bytes, status, said):
    browser = dashboard.browser("admin")
    answer = browser.client.post("/admin/accounts", content=body, headers=FORM)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert said in answer.text
    assert dashboard.number("SELECT count(*) FROM accounts") == 1


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x", ""])
def test_a_form_of_another_kind_is_refused(dashboard: Dashboard, kind: str):
    browser = dashboard.browser("admin")
    answer = browser.client.post(
        "/admin/accounts", content=b'{"name": "a"}', headers={**SAME_ORIGIN, "content-type": kind}
    )
    assert answer.status_code == 400
    assert "must be sent as application/x-www-form-urlencoded" in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/admin/accounts?name=%00",
        "/admin/audit?target=%00",
        "/admin/accounts/acct_%00",
        "/admin/accounts?after=nonsense",
        "/admin/accounts?after=acct_1",
        "/admin/audit?before=x",
        "/admin/audit?before=99999999999999999999",
        "/admin/accounts/nonsense",
    ],
)
def test_a_damaged_address_is_refused_with_a_page(dashboard: Dashboard, path: str):
    answer = dashboard.browser("admin").get(path)
    assert answer.status_code in (400, 404)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("path", ["/admin/login", "/admin/accounts"])
def test_whoever_hangs_up_inside_a_form_is_no_error_of_ours(
    dashboard: Dashboard, caplog: pytest.LogCaptureFixture, path: str
):
    token = dashboard.browser("admin").client.cookies["tiller_session"]
    headers = {**FORM, "host": "testserver", "cookie": f"tiller_session={token}"}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "client": ("192.0.2.1", 1),
        "server": ("testserver", 80),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    coming = [{"type": "http.request", "body": b"key=", "more_body": True}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(dashboard.app(scope, receive, send))  # type: ignore[arg-type]
    assert [message["status"] for message in sent if "status" in message] == [400]
    assert "unexpected error" not in caplog.text
    assert dashboard.number("SELECT count(*) FROM accounts") == 1


def test_without_a_database_only_a_page_says_to_try_again(dashboard: Dashboard):
    browser = dashboard.browser("admin")
    state = dashboard.app.state
    there = state.database
    state.database = Database("postgresql://nobody@127.0.0.1:1/x", size_max=1, wait_seconds=0.2)
    try:
        page = browser.get("/admin/accounts")
        form = browser.post("/admin/accounts", name="a")
    finally:
        state.database.close()
        state.database = there
    assert page.status_code == form.status_code == 503
    assert "Try again." in page.text
    assert "look before you send it again" in form.text
    assert "Nothing was changed" not in page.text + form.text
