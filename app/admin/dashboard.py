"""Puts the dashboard together: its own small application, whose answers are pages.

It stands beside the API in the same process and shares its state, but has its own errors (pages,
not envelopes), its own cap on bodies and its own headers. Order from the outside: headers, the
check of the origin, the routes.
"""

import logging
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote, urlsplit

import psycopg
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, RedirectResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders, State
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.admin.access import PATH, NotLoggedInError, local_path, operator_of
from app.admin.forms import refuse_nul
from app.admin.live import ended_stream
from app.admin.pages import partial, render
from app.admin.router import router
from app.admin.same_origin import check_same_origin
from app.errors import ApiError, InvalidRequestError, NotFoundError, UnavailableError
from app.kit.db import DatabaseUnavailableError
from app.kit.request_id import request_id_of
from app.storage import StoreError

log = logging.getLogger(__name__)

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
TITLES: Final = {
    400: "That was not understood",
    403: "Not allowed",
    404: "Nothing here",
    405: "Not that way",
    409: "Not in this state",
    413: "Too much at once",
    429: "Too many attempts",
    503: "Not reachable at the moment",
}


def create_dashboard(state: State) -> ASGIApp:
    """Build the dashboard on the state of the API (settings, database, store, catalog)."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state = state
    app.include_router(router, dependencies=[Depends(refuse_nul)])
    app.add_exception_handler(NotLoggedInError, _answer_not_logged_in)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(DatabaseUnavailableError, _answer_database_away)
    app.add_exception_handler(psycopg.OperationalError, _answer_database_away)
    app.add_exception_handler(StoreError, _answer_store_away)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_unexpected)
    return _Outside(app)


class DashboardMiddleware:
    """Pure ASGI: everything at or below /admin goes to the dashboard, the rest to the API."""

    def __init__(self, app: ASGIApp, dashboard: ASGIApp) -> None:
        """Stand in front of `app`."""
        self._app = app
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        path = scope.get("path", "")
        ours = scope["type"] == "http" and (path == PATH or path.startswith(f"{PATH}/"))
        await (self._dashboard if ours else self._app)(scope, receive, send)


class _Outside:
    """Sets the headers of every answer and checks the origin, before anything else runs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = finished = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started, finished
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)
            finished = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            check_same_origin(scope["method"], Headers(scope=scope))
        except ApiError as error:
            await _error_page(Request(scope), error)(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:
            # Starlette raises again what _answer_unexpected has answered and logged. With half an
            # answer out the connection must break, not end politely.
            if finished:
                return
            if started:
                raise
            log.exception("the error page failed", extra={"request_id": request_id_of(scope)})
            plain = PlainTextResponse(f"Something went wrong here: {request_id_of(scope)}.", 500)
            await plain(scope, receive, send_with_headers)


async def _answer_not_logged_in(request: Request, _error: Any) -> Response:
    """Lead to the login page, and from there back to where the request wanted to go."""
    if "text/event-stream" in request.headers.get("accept", ""):
        return ended_stream("logged out")
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    if request.method not in ("GET", "HEAD"):
        here = PATH
    htmx = request.headers.get("hx-request") == "true"
    if htmx:
        # A piece is no place to return to; the page that asked for it is.
        here = _path_in(request.headers.get("hx-current-url", ""))
    login = f"{PATH}/login?next={quote(local_path(here), safe='/')}"
    if htmx:
        return Response(status_code=401, headers={"hx-redirect": login})
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        # A link from elsewhere: the browser withheld the SameSite=Strict cookie. Asked again by a
        # page of ours, it sends it.
        return render(request, "again.html", here=local_path(here))
    return RedirectResponse(login, status_code=303)


def _path_in(address: str) -> str:
    """Give path and query of an address."""
    try:
        parts = urlsplit(address)
    except ValueError:  # half an IPv6 address
        return PATH
    return parts.path + (f"?{parts.query}" if parts.query else "")


async def _answer_api_error(request: Request, error: Any) -> Response:
    assert isinstance(error, ApiError)
    await _note_operator(request)
    return _error_page(request, error)


async def _answer_http_exception(request: Request, error: Any) -> Response:
    assert isinstance(error, HTTPException)
    await _note_operator(request)
    if error.status_code == 404:
        return _error_page(request, NotFoundError(f"There is no page {request.url.path[:200]}."))
    answer = _error_page(request, InvalidRequestError(str(error.detail)), error.status_code)
    answer.headers.update(error.headers or {})
    return answer


async def _answer_validation_error(request: Request, error: Any) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    await _note_operator(request)
    return _error_page(request, InvalidRequestError(f"{first['loc'][-1]}: {first['msg']}."))


async def _answer_database_away(request: Request, error: Any) -> Response:
    log.warning("database away", extra={"error": repr(error), "path": request.url.path[:200]})
    msg = "The database cannot be reached at the moment. "
    if request.method in ("GET", "HEAD"):
        msg += "Try again."
    else:
        # An act of several transactions may be half done, and a commit's answer may be lost.
        msg += (
            "What you asked for may have been done, or done in part: look before you send it again."
        )
    return _error_page(request, UnavailableError(msg, retry_after=2))


async def _answer_store_away(request: Request, error: Any) -> Response:
    log.warning("object store away", extra={"error": repr(error), "path": request.url.path[:200]})
    msg = (
        "The object store, which keeps the files of Jobs, cannot be reached at the moment. "
        "The file is not lost by this; try again."
    )
    return _error_page(request, UnavailableError(msg, retry_after=2))


async def _answer_nobody(_request: Request, _error: Any) -> Response:
    """Answer whoever hung up in the middle of a form: nobody reads it, and it is no fault here."""
    return Response(status_code=400)


async def _answer_unexpected(request: Request, error: Any) -> Response:
    log.error(
        "unexpected error",
        exc_info=error,
        extra={
            "request_id": request_id_of(request.scope),
            "method": request.method,
            "path": request.url.path[:500],
        },
    )
    msg = "Something went wrong here, and it was logged. Tell the operator the id below."
    return _error_page(request, ApiError(msg))


async def _note_operator(request: Request) -> None:
    """Find out who is at the dashboard, where no route did: their error pages keep the menu."""
    if hasattr(request.state, "operator"):
        return
    state = request.app.state
    try:
        await run_in_threadpool(operator_of, request, state.settings, state.database)
    except (NotLoggedInError, DatabaseUnavailableError, psycopg.Error):
        return  # a page without a menu says what is to be said, too


def _error_page(request: Request, error: ApiError, status: int | None = None) -> Response:
    status = status or error.status
    htmx = request.headers.get("hx-request") == "true"
    answer: Callable[..., Response] = partial if htmx else render
    page = answer(
        request,
        "_error.html" if htmx else "error.html",
        status=status,
        heading=TITLES.get(status, "Something went wrong"),
        message=error.message,
        code=error.code,
    )
    if error.retry_after is not None:
        page.headers["retry-after"] = str(error.retry_after)
    return page
