"""How often a key may ask: a moving window of a minute in Redis that all API processes share.

A route names its rate beside its scope; the key's requests of the last 60 seconds are counted
once the caller is known and before anything of the body is looked at. Answers of such routes say
what is left. Redis is no truth: while it is away requests pass, and after a failure it is left
alone for some seconds, so that a frozen one delays a request once and not all of them.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar
from uuid import UUID

from fastapi import Depends, Request
from limits import RateLimitItemPerMinute
from limits.errors import StorageError
from limits.storage import RedisStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.accounts.access import CallerDep
from app.errors import TooManyRequestsError
from app.settings import Limits

log = logging.getLogger(__name__)
T = TypeVar("T")

SOCKET_SECONDS = 0.5  # the longest that one look into Redis may take
LEFT_ALONE_SECONDS = 5.0  # after a failure
LOGGED_SECONDS = 60.0  # between two lines about it
RETRY_AFTER_MAX = 120
STATE = "rate_headers"  # where the dependency leaves them for the middleware


class Rate(StrEnum):
    """What is counted apart from each other; the values are names of settings."""

    completions = "completions_per_minute"
    creates = "creates_per_minute"
    requests = "requests_per_minute"


_COUNTED = {
    Rate.completions: "POST /v1/completions",
    Rate.creates: "POST requests that create something",
    Rate.requests: "other POST requests",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a key stands: `reset_seconds` until its oldest counted request is a minute old."""

    limit: int
    remaining: int
    reset_seconds: float
    is_over: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """Write it as the headers that OpenAI's clients know."""
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": _duration(self.reset_seconds),
        }


class RateLimits:
    """Counts requests by key; one object for each API process."""

    def __init__(
        self, redis_url: str, limits: Limits, *, left_alone_seconds: float = LEFT_ALONE_SECONDS
    ) -> None:
        """Connect to Redis on first use."""
        address = f"redis+{redis_url}" if redis_url.startswith("unix://") else redis_url
        # The library's options are annotated too narrowly: retry=None turns its retries off.
        options: dict[str, Any] = {
            "socket_connect_timeout": SOCKET_SECONDS,
            "socket_timeout": SOCKET_SECONDS,
            "retry": None,
        }
        self._storage = RedisStorage(address, key_prefix="tiller:rate", **options)
        theirs = self._storage.base_exceptions
        self._failures: tuple[type[Exception], ...] = (
            *(theirs if isinstance(theirs, tuple) else (theirs,)),
            StorageError,
            OSError,
        )
        self._window = MovingWindowRateLimiter(self._storage)
        self._items = {
            rate: RateLimitItemPerMinute(amount, namespace=rate.value)
            for rate in Rate
            if (amount := getattr(limits, rate.value)) > 0
        }
        self._circuit = _Circuit(left_alone_seconds)

    def count(self, rate: Rate, key_id: UUID) -> Standing | None:
        """Count a request and say where its key stands; None when nothing is limited or known."""
        return self._ask(rate, key_id, counts=True)

    def look(self, rate: Rate, key_id: UUID) -> Standing | None:
        """Say where a key stands without counting."""
        return self._ask(rate, key_id, counts=False)

    def close(self) -> None:
        """Close the connections."""
        self._storage.storage.close()

    def _ask(self, rate: Rate, key_id: UUID, *, counts: bool) -> Standing | None:
        item = self._items.get(rate)
        if item is None or not self._circuit.lets_pass():
            return None
        try:
            taken = self._window.hit(item, key_id.hex) if counts else True
            window = self._window.get_window_stats(item, key_id.hex)
        except self._failures as error:
            self._circuit.failed(error)
            return None
        self._circuit.worked()
        left = max(0.0, window.reset_time - time.time())
        return Standing(item.amount, max(0, window.remaining), left, is_over=not taken)


class _Circuit:
    """Leaves Redis alone for a while after a failure; then one request tries it for all."""

    def __init__(self, left_alone_seconds: float) -> None:
        self._left_alone = left_alone_seconds
        self._lock = threading.Lock()
        self._is_suspect = False
        self._closed_until = 0.0
        self._logged_at: float | None = None

    def lets_pass(self) -> bool:
        if not self._is_suspect:
            return True
        with self._lock:
            now = time.monotonic()
            if now < self._closed_until:
                return False
            self._closed_until = now + self._left_alone
            return True

    def worked(self) -> None:
        self._is_suspect = False

    def failed(self, error: Exception) -> None:
        with self._lock:
            now = time.monotonic()
            self._is_suspect = True
            self._closed_until = now + self._left_alone
            silent = self._logged_at is not None and now - self._logged_at < LOGGED_SECONDS
            if not silent:
                self._logged_at = now
        if not silent:
            log.warning("rates are not limited: Redis is away", extra={"error": repr(error)})


def counted(rate: Rate) -> Callable[[Request, CallerDep], None]:
    """Make a dependency that counts a request of the caller's key, and refuses one too many.

    The dependency raises TooManyRequestsError.
    """

    def count(request: Request, caller: CallerDep) -> None:
        rates: RateLimits = request.app.state.rates
        standing = rates.count(rate, caller.key_id)
        if standing is None:
            return
        request.scope["state"][STATE] = standing.headers
        if standing.is_over:
            raise _too_many(rate, standing)

    return count


# Beside a route: dependencies=[COMPLETIONS_RATE].
COMPLETIONS_RATE = Depends(counted(Rate.completions))
CREATES_RATE = Depends(counted(Rate.creates))
REQUESTS_RATE = Depends(counted(Rate.requests))


class RateHeadersMiddleware:
    """Pure ASGI: puts what `counted` found out on every answer, errors and streams too."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                found: dict[str, str] = scope["state"].get(STATE, {})
                lines = [(name.encode(), value.encode()) for name, value in found.items()]
                message.setdefault("headers", []).extend(lines)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def _too_many(rate: Rate, standing: Standing) -> TooManyRequestsError:
    wait = min(RETRY_AFTER_MAX, max(1, math.ceil(standing.reset_seconds)))
    return TooManyRequestsError(
        f"This key has sent {standing.limit} {_COUNTED[rate]} within the last minute, and more are "
        f"not allowed ({rate.value} in GET /v1/limits). Send it again in {wait} s.",
        retry_after=wait,
    )


def _duration(seconds: float) -> str:
    """Write whole seconds, rounded up, as OpenAI does: 1s, 6m0s."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
