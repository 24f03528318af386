"""GET /healthz (this process answers) and GET /readyz (the service can do its work).

Ready means: Postgres answers and has the schema of this code, the object store answers, and a
worker has proved that it steers.
Redis is reported but not needed: without it work only starts up to a reconciler period later.
Both answer within seconds, whatever hangs: they wait neither for a part nor for a free thread.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response

from app.catalog.queue_state import queue_states
from app.errors import UnavailableError
from app.kit.answers import json_answer
from app.kit.db import Conn, Database
from app.kit.migrate import is_behind
from app.kit.openapi import COUNT, ERROR, STRING, answer, closed, documented
from app.kit.question import Question
from app.kit.request_id import request_id_of
from app.queue import Waker
from app.storage import ObjectStore

log = logging.getLogger(__name__)
router = APIRouter(tags=["health"])

PARTS_SECONDS: Final = 3.0  # of all parts together
_CHECKS: Final = {
    **dict.fromkeys(("postgres", "schema", "object_store", "redis", "worker"), STRING),
    "workers_ready": {"type": "object", "additionalProperties": COUNT},
}
_READINESS: Final = {"status": STRING, "checks": closed(_CHECKS)}


@router.get(
    "/healthz", **documented({200: answer("It answers.", closed({"status": {"const": "ok"}}))})
)
async def get_health() -> Response:
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
async def get_readiness(request: Request) -> Response:
    """Say whether the service can do its work, part by part; 503 when it cannot."""
    asked: Question[dict[str, Any]] = request.app.state.readiness
    checks = await asyncio.wrap_future(asked.begin())
    needed = ("postgres", "schema", "object_store", "worker")
    missing = [name for name in needed if checks[name] != "ok"]
    if not missing:
        return json_answer({"status": "ready", "checks": checks})
    error = UnavailableError(f"Not ready: {', '.join(missing)}.", code="not_ready", retry_after=2)
    content = {"status": "not_ready", "checks": checks}
    content |= error.envelope(request_id_of(request.scope))
    return json_answer(content, status=error.status, headers={"retry-after": "2"})


def prepare_readiness(app: FastAPI) -> None:
    """Give an API the question whether it is ready; its parts are there once it has started."""

    def postgres() -> object:
        database: Database = app.state.database
        return database.run(_look_at_postgres, attempts=1)

    parts = part_questions(app, postgres)
    app.state.readiness = Question(lambda: _check(parts), name="readiness")


def part_questions(app: FastAPI, postgres: Callable[[], object]) -> dict[str, Question[Any]]:
    """Prepare the questions whether each part is there; Postgres is asked by `postgres`.

    Each answers something true when the part is there.
    """
    state = app.state

    def store() -> bool:
        objects: ObjectStore = state.store
        objects.check()
        return True

    def redis() -> bool:
        waker: Waker = state.waker
        return waker.reachable()

    asks = {"postgres": postgres, "object_store": store, "redis": redis}
    return {part: Question(ask, name=f"ask-{part}") for part, ask in asks.items()}


def ask_parts(parts: Mapping[str, Question[Any]], seconds: float) -> dict[str, Any]:
    """Ask all parts at once and wait for all of them together; None of those that are away."""
    until = time.monotonic() + seconds
    asked = {part: question.begin() for part, question in parts.items()}
    return {part: _in_time(part, each, until - time.monotonic()) for part, each in asked.items()}


def _in_time(part: str, asked: "Future[Any]", seconds: float) -> Any:
    try:
        return asked.result(max(0.0, seconds))
    except Exception as error:  # noqa: BLE001 (whatever a part raises, it is down)
        log.warning("part down", extra={"part": part, "error": repr(error)})
        return None


def _check(parts: Mapping[str, Question[Any]]) -> dict[str, Any]:
    found = ask_parts(parts, PARTS_SECONDS)
    checks: dict[str, Any] = {part: "ok" if found[part] else "down" for part in parts}
    ready: dict[str, int] = {}
    checks["schema"] = "unknown"
    if found["postgres"]:
        (counted,) = found["postgres"]
        checks["schema"] = "needs `python -m app migrate`" if counted is None else "ok"
        ready = counted or {}
    checks["worker"] = "ok" if any(ready.values()) else "none ready"
    checks["workers_ready"] = ready
    return checks


def _look_at_postgres(conn: Conn) -> tuple[dict[str, int] | None]:
    """Count the ready workers of each model; None while the schema is older than this code."""
    if is_behind(conn):
        return (None,)
    return ({model: queue.workers_ready for model, queue in queue_states(conn).items()},)
