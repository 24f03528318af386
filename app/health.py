"""GET /healthz (this process answers) and GET /readyz (the service can do its work).

Ready means: Postgres answers and has the schema of this code, the object store answers, and a
worker has proved that it steers.
Redis is reported but not needed: without it work only starts up to a reconciler period later.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from app.catalog.queue_state import queue_states
from app.errors import UnavailableError
from app.kit.answers import json_answer
from app.kit.db import Database
from app.kit.migrate import is_behind
from app.kit.openapi import COUNT, ERROR, STRING, answer, closed, documented
from app.kit.request_id import request_id_of

log = logging.getLogger(__name__)
router = APIRouter(tags=["health"])

_CHECKS: Final = {
    **dict.fromkeys(("postgres", "schema", "object_store", "redis", "worker"), STRING),
    "workers_ready": {"type": "object", "additionalProperties": COUNT},
}
_READINESS: Final = {"status": STRING, "checks": closed(_CHECKS)}


@router.get(
    "/healthz", **documented({200: answer("It answers.", closed({"status": {"const": "ok"}}))})
)
def get_health() -> Response:
    """Say that this process answers."""
    return json_answer({"status": "ok"})


@router.get(
    "/readyz",
    **documented(
        {
            200: answer("It can.", closed(_READINESS)),
            503: answer("It cannot, and why.", closed({**_READINESS, **ERROR["properties"]})),
        }
    ),
)
def get_readiness(request: Request) -> Response:
    """Say whether the service can do its work, part by part; 503 when it cannot."""
    state = request.app.state
    database: Database = state.database
    checks: dict[str, Any] = {
        "postgres": _try("postgres", lambda: database.run(_select_one, attempts=1)),
        "object_store": "ok" if state.store_probe.answers() else "down",
        "redis": "ok" if state.waker.reachable() else "down",
    }
    ready: dict[str, int] = {}
    checks["schema"] = "unknown"
    if checks["postgres"] == "ok":
        behind = database.run(is_behind, attempts=1)
        checks["schema"] = "needs `python -m app migrate`" if behind else "ok"
    if checks["schema"] == "ok":
        queues = database.run(queue_states, attempts=1)
        ready = {model: queue.workers_ready for model, queue in queues.items()}
    checks["worker"] = "ok" if any(ready.values()) else "none ready"
    checks["workers_ready"] = ready
    needed = ("postgres", "schema", "object_store", "worker")
    missing = [name for name in needed if checks[name] != "ok"]
    if not missing:
        return json_answer({"status": "ready", "checks": checks})
    error = UnavailableError(f"Not ready: {', '.join(missing)}.", code="not_ready", retry_after=2)
    content = {"status": "not_ready", "checks": checks}
    content |= error.envelope(request_id_of(request.scope))
    return json_answer(content, status=error.status, headers={"retry-after": "2"})


def _select_one(conn: Any) -> None:
    conn.execute("SELECT 1")


def _try(part: str, check: Callable[[], object]) -> str:
    try:
        check()
    except Exception as error:  # noqa: BLE001 (whatever a part raises, it is down)
        log.warning("not ready", extra={"part": part, "error": repr(error)})
        return "down"
    return "ok"
