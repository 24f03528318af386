"""Gives every HTTP request an id, and is the last line where an exception may arrive.

The id is in the header x-request-id of every answer, in the body of every error and in every log
line that is written while the request is handled; one of these says how it ended. An exception
that nobody turned into an answer is a fault of ours: it is logged here, once, and becomes a 500
whose body says nothing but the id.
"""

import logging
import time
import uuid
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ApiError
from app.kit.logs import log_fields

log = logging.getLogger(__name__)

HEADER = b"x-request-id"
# Asked for every few seconds by machines: a line only when the answer is not a good one.
QUIET_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})


class RequestIdMiddleware:
    """Pure ASGI, outermost: `scope["state"]["request_id"]` is set for everything inside."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request under its id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        with log_fields(request_id=request_id):
            await self._run(scope, receive, send, request_id)

    async def _run(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        status = 0
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((HEADER, request_id.encode()))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # nobody is left to answer
        except Exception:
            log.exception("unexpected error", extra={**_named(scope), "request_id": request_id})
            if status:
                raise  # half an answer is out: the connection must break, not end politely
            error = ApiError("Something went wrong here. Tell the operator the request_id.")
            await send_error(send_with_id, error, request_id)
        finally:
            if status >= 400 or scope["path"] not in QUIET_PATHS:
                seconds = round(time.perf_counter() - began, 4)
                line = {**_named(scope), "status": status, "seconds": seconds}
                log.info("request" if status else "client left", extra=line)


def _named(scope: Scope) -> dict[str, str]:
    """Name a request in a log line; a query may hold what somebody typed, so it is left out."""
    return {"method": scope["method"][:20], "path": scope["path"][:500]}


async def send_error(
    send: Send, error: ApiError, request_id: str, headers: dict[str, str] | None = None
) -> None:
    """Send an error's envelope as the whole answer (for places outside the router)."""
    body = orjson.dumps(error.envelope(request_id))
    lines: list[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), value.encode()) for name, value in (headers or {}).items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


def request_id_of(scope: Scope) -> str:
    """Give the id of the request in this scope."""
    state: dict[str, Any] = scope["state"]
    request_id: str = state["request_id"]
    return request_id
