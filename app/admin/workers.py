"""The page of workers, and asking one to drain."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.admin.access import PATH, Operator, operator_of, require_role
from app.admin.actions import drain_worker, undrain_worker
from app.admin.followed import Followed, live_at
from app.admin.pages import render
from app.admin.worker_reads import list_workers
from app.errors import NotFoundError
from app.kit.db import Conn
from app.kit.deps import DatabaseDep
from app.kit.ids import parse_id

router = APIRouter(dependencies=[Depends(operator_of)])
Steward = Annotated[Operator, Depends(require_role("operator"))]

GONE_MINUTES: Final = 60
PIECES: Final = {"workers": "_worker_list.html", "gone": "_workers_gone.html"}
SAID: Final = {
    "drain": "The worker leases nothing more. It finishes what it has and then ends.",
    "undrain": "The worker goes on leasing.",
    "same": "It was so already; nothing was changed.",
}


@router.get("/workers")
def show_workers(request: Request, database: DatabaseDep) -> HTMLResponse:
    """List workers: those there are, then those that left within the hour."""
    return render(
        request,
        "workers.html",
        **database.read(_read),
        **live_at("workers"),
        said=SAID.get(request.query_params.get("said", "")),
    )


def followed(_request: Request) -> Followed:
    """Say how the page of workers is followed."""
    return Followed(key="workers", read=_read, pieces=PIECES)


def _read(conn: Conn) -> dict[str, Any]:
    workers = list_workers(conn, gone_minutes=GONE_MINUTES)
    return {
        "workers": [worker for worker in workers if worker.state != "gone"],
        "gone": [worker for worker in workers if worker.state == "gone"],
    }


@router.post("/workers/{worker_id}/drain")
def drain(worker_id: str, operator: Steward, database: DatabaseDep) -> Response:
    """Ask a worker to end when it has finished."""
    number = parse_id("worker", worker_id)
    if number is None:
        raise _no_worker(worker_id)
    changed = database.run(lambda conn: drain_worker(conn, operator, number))
    return RedirectResponse(f"{PATH}/workers?said={'drain' if changed else 'same'}", 303)


@router.post("/workers/{worker_id}/undrain")
def undrain(worker_id: str, operator: Steward, database: DatabaseDep) -> Response:
    """Take the wish back."""
    number = parse_id("worker", worker_id)
    if number is None:
        raise _no_worker(worker_id)
    changed = database.run(lambda conn: undrain_worker(conn, operator, number))
    return RedirectResponse(f"{PATH}/workers?said={'undrain' if changed else 'same'}", 303)


def _no_worker(name: str) -> NotFoundError:
    return NotFoundError(f"There is no worker {name[:80]!r}.", param="worker_id")
