"""Caps the body of every request: by its content-length at once, and by counting what arrives.

Starlette would put any body into memory whole. Here at most the cap and one chunk are, and a
large body has a place in the line of its route (kit/large_bodies.py) from its first chunk on.
"""

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import RequestTooLargeError
from app.kit.large_bodies import Line, placed
from app.kit.request_id import request_id_of, send_error


class BodyLimitMiddleware:
    """Pure ASGI: answers 413 before a body over `bytes_max` is read, 429 before one too many."""

    def __init__(
        self, app: ASGIApp, bytes_max: int, line: Line, lines_of: Mapping[str, Line]
    ) -> None:
        """Wrap `app`. Large bodies stand in `line`, those of a path in `lines_of` in its own."""
        self._app = app
        self._bytes_max = bytes_max
        self._line = line
        self._lines_of = lines_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request, counting its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        # Longer digit strings are over any cap; int() of a huge one would be slow.
        if length.isdigit() and (len(length) > 18 or int(length) > self._bytes_max):
            error = self._error(length[:30].decode())
            close = {"connection": "close"}
            await send_error(send, error, request_id_of(scope), close)
            return
        announced, received = int(length) if length.isdigit() else 0, 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._bytes_max:
                    raise self._error(f"more than {self._bytes_max}")
                place.grow(max(announced, received))
            return message

        line = self._lines_of.get(scope["path"], self._line)
        with placed(line, scope["state"]) as place:
            await self._app(scope, counted, send)

    def _error(self, actual: str) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"The body has {actual} bytes; at most {self._bytes_max} are allowed. Send less in one "
            "request, or send vectors encoded instead of as JSON numbers."
        )
