"""The first page: what the service does now, and what needs a person."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from app.admin.access import operator_of
from app.admin.overview_reads import (
    ERROR_COMPLETIONS_MAX,
    ERROR_JOBS_MAX,
    ERRORS_OF_JOB_MAX,
    Minute,
    Overview,
    read_overview,
)
from app.admin.pages import render
from app.kit.deps import DatabaseDep

router = APIRouter(dependencies=[Depends(operator_of)])

# Pieces of the page, which are sent anew when they change: name of the event, template.
PIECES = {
    "attention": "_attention.html",
    "tiles": "_tiles.html",
    "charts": "_charts.html",
    "queues": "_queues.html",
    "live-jobs": "_live_jobs.html",
    "errors": "_errors.html",
    "crew": "_crew.html",
}


@dataclass(frozen=True, slots=True)
class Attention:
    """Something that a person should look at."""

    kind: str
    title: str
    text: str
    href: str


@router.get("")
def show_overview(request: Request, database: DatabaseDep) -> HTMLResponse:
    """Show the overview."""
    return render(request, "overview.html", **overview_context(database.run(read_overview)))


def overview_context(overview: Overview) -> dict[str, Any]:
    """Give what the templates of the overview need."""
    return {
        "overview": overview,
        "attention": _attention(overview),
        "tokens_chart": _series(overview.minutes, "tokens", "Tokens", "tok/s"),
        "requests_chart": _series(overview.minutes, "requests", "Requests", "req/s"),
        "counted": {
            "jobs": ERROR_JOBS_MAX,
            "errors": ERRORS_OF_JOB_MAX,
            "completions": ERROR_COMPLETIONS_MAX,
        },
    }


def _series(minutes: Sequence[Minute], name: str, label: str, unit: str) -> str:
    """Write a chart's numbers as JSON; uPlot takes columns."""
    return orjson.dumps(
        {
            "label": label,
            "unit": unit,
            "times": [minute.at for minute in minutes],
            "values": [getattr(minute, name) for minute in minutes],
        }
    ).decode()


def _attention(overview: Overview) -> list[Attention]:
    found = []
    silent = [worker for worker in overview.workers if worker.condition == "silent"]
    if silent:
        names = ", ".join(f"{worker.host} ({worker.model})" for worker in silent[:3])
        text = f"{names}: no heartbeat. Leases end by themselves and other workers take over."
        found.append(Attention("bad", "Workers are silent", text, "/admin/workers"))
    failed = [w for w in overview.workers if w.canary not in (None, "passed")]
    if failed:
        text = f"{failed[0].host} ({failed[0].model}): {failed[0].canary}"
        found.append(Attention("bad", "A check of steering failed", text[:300], "/admin/workers"))
    idle = [queue for queue in overview.queues if queue.pending and not queue.workers]
    if idle:
        names = ", ".join(queue.model for queue in idle[:5])
        text = f"No worker serves {names}; Jobs wait until one does."
        found.append(Attention("warn", "Work without a worker", text, "/admin/models"))
    if overview.tokens.stopped:
        text = "Their ledger does not add up or an admin stopped them; they get no new Holds."
        found.append(Attention("bad", "Accounts are stopped", text, "/admin/accounts"))
    return found
