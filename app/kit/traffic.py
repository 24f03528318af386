"""Counts HTTP requests for Prometheus: how many, how long, by route template and status.

Labels are templates (`/v1/jobs/{job_id}`), never what a client sent, so their number is bounded
by the code. Completions are also counted under the names of OpenTelemetry's gen_ai conventions.
"""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
COMPLETIONS = "/v1/completions"


class Traffic:
    """The instruments of one process, in a registry of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the instruments."""
        self.requests = Counter(
            "tiller_http_requests", "HTTP requests answered.", ["method", "route", "status"],
            registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "tiller_http_request_duration_seconds",
            "From the request to the last byte of its answer.",
            ["method", "route"], buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.open = Gauge(
            "tiller_http_requests_open", "HTTP requests being answered now.", registry=registry
        )
        self.completion_seconds = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From a Completion's request to the last byte of its answer.",
            ["gen_ai_operation_name", "error_type"], buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.first_token_seconds = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a Completion's request to the first bytes of its stream.",
            ["gen_ai_operation_name"], buckets=SECONDS, registry=registry,
        )  # fmt: skip


class TrafficMiddleware:
    """Pure ASGI, outermost: sees every answer, also those of the middleware inside."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        """Wrap `app`."""
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request and count it when it has ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, streams = 0, False
        first: float | None = None
        began = time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status, streams, first
            if message["type"] == "http.response.start":
                status = message["status"]
                kinds = [value for name, value in message["headers"] if name == b"content-type"]
                streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
            elif first is None and message.get("body"):
                first = time.perf_counter() - began
            await send(message)

        traffic = self._traffic
        traffic.open.inc()
        try:
            await self._app(scope, receive, watched)
        finally:
            traffic.open.dec()
            seconds = time.perf_counter() - began
            route = route_of(scope)
            method = scope["method"] if scope["method"] in METHODS else "other"
            traffic.requests.labels(method, route, str(status or "none")).inc()
            traffic.seconds.labels(method, route).observe(seconds)
            if route == COMPLETIONS and method == "POST":
                error = "" if 200 <= status < 300 else str(status or "none")
                traffic.completion_seconds.labels("text_completion", error).observe(seconds)
                if streams and first is not None:
                    traffic.first_token_seconds.labels("text_completion").observe(first)


def route_of(scope: Scope) -> str:
    """Name the template of the route that answered; one word for all paths without one."""
    path = getattr(scope.get("route"), "path", None)
    if isinstance(path, str):
        return path
    return "/admin" if str(scope["path"]).startswith("/admin") else "none"
