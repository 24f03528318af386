"""Gives every HTTP request an id, and is the last line where an exception may arrive.

The id is in the header x-request-id of every answer and in the body of every error. An exception
that nobody turned into an answer is a fault of ours: it is logged here, once, and becomes a 500
whose body says nothing but the id.
"""

import logging
import uuid
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ApiError

log = logging.getLogger(__name__)

HEADER = b"x-request-id"


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
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message.setdefault("headers", []).append((HEADER, request_id.encode()))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # nobody is left to answer
        except Exception:
            log.exception(
                "unexpected error",
                extra={
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"][:500],
                },
            )
            if started:
                raise  # half an answer is out: the connection must break, not end politely
            error = ApiError("Something went wrong here. Tell the operator the request_id.")
            await send_error(send_with_id, error, request_id)


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
