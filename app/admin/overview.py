"""The first page: what the service does now, and what needs a person."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from app.admin.access import PATH, operator_of
from app.admin.filters import excerpt
from app.admin.followed import Followed, live_at
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
from app.kit.ids import public_id

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


UNPROVEN = "No worker of that model that started later has passed it yet."


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
    context = overview_context(database.read(read_overview))
    return render(request, "overview.html", **context, **live_at("overview"))


def followed(_request: Request) -> Followed:
    """Say how the overview is followed."""
    return Followed(
        key="overview", read=lambda conn: overview_context(read_overview(conn)), pieces=PIECES
    )


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
    if overview.unproven:
        last = overview.unproven[0]
        others = sum(proof.workers for proof in overview.unproven) - 1
        text = f"{last.host} ({last.model}): {last.outcome}"
        text = f"{excerpt(text, 300)}{f', and {others} more' if others else ''}. {UNPROVEN}"
        found.append(Attention("bad", "A check of steering failed", text, "/admin/workers"))
    idle = [queue for queue in overview.queues if queue.pending and not queue.workers]
    if idle:
        names = ", ".join(queue.model for queue in idle[:5])
        text = f"No worker serves {names}; Jobs wait until one does."
        found.append(Attention("warn", "Work without a worker", text, "/admin/models"))
    if overview.stopped:
        found.append(_stopped(overview))
    return found


def _stopped(overview: Overview) -> Attention:
    """Say which accounts get no new Holds, and why the only one or the last one does not."""
    last, more = overview.stopped[0], overview.tokens.stopped - len(overview.stopped)
    if len(overview.stopped) == 1:
        text = f"{excerpt(last.name, 80)} gets no new Holds: {excerpt(last.reason, 300)}"
        href = f"{PATH}/accounts/{public_id('acct', last.id)}"
        return Attention("bad", "An account is stopped", text, href)
    names = ", ".join(excerpt(account.name, 80) for account in overview.stopped)
    text = f"{names}{f' and {more} more' if more > 0 else ''} get no new Holds."
    title = f"{overview.tokens.stopped} accounts are stopped"
    return Attention("bad", title, text, f"{PATH}/accounts?holds=stopped")
