"""Login with an admin key, and logout: where sessions of the dashboard begin and end.

Every attempt costs the same work, whatever the key looks like, and is in the audit log. Failures
are counted in Postgres for the address they came from, so that every API process knows of them.
"""

import logging
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.accounts.keys import find_key, is_well_formed, key_digest
from app.admin.access import COOKIE, PATH, Operator, OperatorDep, local_path
from app.admin.audit import record
from app.admin.forms import FormDep
from app.admin.pages import render
from app.admin.sessions import begin_session, end_session, find_session
from app.kit.db import Conn
from app.kit.deps import DatabaseDep, SettingsDep
from app.kit.ids import public_id
from app.settings import Settings

log = logging.getLogger(__name__)
router = APIRouter()

KEY_CHARS_MAX: Final = 200
WRONG: Final = (
    "This key does not open the dashboard. It must be a whole key (sk_live_ and 72 hexadecimal "
    "digits) with the scope admin that is neither revoked nor expired."
)


class TooManyFailuresError(Exception):
    """This address failed too often; the key was not looked at."""


@router.get("/login")
def show_login(request: Request) -> HTMLResponse:
    """Show the form."""
    return _form(request, request.query_params.get("next"))


@router.post("/login")
def log_in(
    request: Request, form: FormDep, database: DatabaseDep, settings: SettingsDep
) -> Response:
    """Begin a session with a new token, and end the one that the browser had."""
    key = form.text("key", chars_max=KEY_CHARS_MAX, needed=False)
    address = "" if request.client is None else request.client.host
    old_token = request.cookies.get(COOKIE, "")
    try:
        token = database.run(
            lambda conn: _begin(conn, key, settings, address=address, old_token=old_token),
            attempts=1,
        )
    except TooManyFailuresError:
        minutes = max(1, round(settings.admin_login_wait_seconds / 60))
        message = (
            f"Too many failed logins from {address}, so this one was not looked at. Wait up to "
            f"{minutes} min and try again; other addresses are not affected."
        )
        page = _form(request, form.text("next", needed=False, chars_max=3000), message, 429)
        page.headers["retry-after"] = str(round(settings.admin_login_wait_seconds))
        return page
    if token is None:
        log.warning("dashboard login failed", extra={"address": address})
        return _form(request, form.text("next", needed=False, chars_max=3000), WRONG, 403)
    answer = RedirectResponse(local_path(form.text("next", needed=False, chars_max=3000)), 303)
    answer.set_cookie(
        COOKIE,
        token,
        max_age=round(settings.admin_session_seconds),
        path=PATH,
        secure=settings.admin_https or request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/logout")
def log_out(operator: OperatorDep, database: DatabaseDep) -> Response:
    """End the session."""

    def end(conn: Conn) -> None:
        end_session(conn, operator.session_id)
        record(conn, operator, "logout", public_id("key", operator.key_id))

    database.run(end)
    answer = RedirectResponse(f"{PATH}/login", 303)
    answer.delete_cookie(COOKIE, path=PATH, httponly=True, samesite="strict")
    answer.headers["clear-site-data"] = '"cache"'
    return answer


def _begin(conn: Conn, key: str, settings: Settings, *, address: str, old_token: str) -> str | None:
    """Give the token of a new session; None for a wrong key. Raises TooManyFailuresError."""
    pepper = settings.key_pepper.get_secret_value()
    # One attempt of an address after the other, so that a burst cannot pass the limit.
    conn.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 1))", [address])
    if _failures(conn, address, settings.admin_login_wait_seconds) >= settings.admin_login_failures:
        raise TooManyFailuresError
    found = find_key(conn, key_digest(key, pepper))
    if found is None or found.role is None or not is_well_formed(key):
        known = None if found is None else public_id("key", found.id)
        why = "unknown key" if found is None else "no admin key"
        record(conn, None, "login_failed", known or "", address=address, after={"reason": why})
        return None
    if old_token:
        old = find_session(
            conn, key_digest(old_token, pepper), idle_seconds=settings.admin_idle_seconds
        )
        if old is not None:
            end_session(conn, old.id)
    session_id, token = begin_session(
        conn, found.id, pepper=pepper, session_seconds=settings.admin_session_seconds
    )
    operator = Operator(found.id, session_id, found.name, found.role)
    record(conn, operator, "login", public_id("key", found.id), address=address)
    return token


def _failures(conn: Conn, address: str, seconds: float) -> int:
    row = conn.execute(
        """
        SELECT count(*) AS failures FROM audit_log
        WHERE action = 'login_failed' AND address = %s
            AND at > now() - make_interval(secs => %s)
        """,
        [address, seconds],
    ).fetchone()
    assert row is not None
    return int(row["failures"])


def _form(
    request: Request, where: str | None, message: str | None = None, status: int = 200
) -> HTMLResponse:
    return render(request, "login.html", status=status, next=local_path(where), message=message)
