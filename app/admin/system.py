"""The system page: versions, settings, limits, storage, and the invariants with their last run."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.admin.access import LOGGED_IN, PATH, Operator, require_role
from app.admin.audit import record
from app.admin.followed import Followed, live_at
from app.admin.pages import render
from app.admin.system_reads import own_versions, read_storage, shown_settings, worker_engines
from app.errors import ConflictError
from app.jobs.audit_runs import claim_run, last_runs, note_run, run_rules, snapshot, started_at
from app.kit.db import Conn
from app.kit.deps import DatabaseDep, SettingsDep

router = APIRouter()
Steward = Annotated[Operator, Depends(require_role("operator"))]

PIECES: Final = {
    "invariants": "_system_invariants.html",
    "storage": "_system_storage.html",
    "engines": "_system_engines.html",
}
FRESH_SECONDS: Final = 10.0  # sizes are read from the file system, and nobody waits for them
# A person waits for the page: the reconciler's own run has ten minutes a rule.
RULE_SECONDS: Final = 10.0
RUN_SECONDS: Final = 20.0
SAID: Final = {"ran": "The invariants were checked; the outcome is below."}


@router.get("/system", dependencies=[LOGGED_IN])
def show_system(request: Request, database: DatabaseDep, settings: SettingsDep) -> HTMLResponse:
    """Show what runs here and how it is set."""
    return render(
        request,
        "system.html",
        versions=own_versions(),
        **database.read(_read),
        **live_at("system"),
        settings=shown_settings(settings),
        limits=shown_settings(settings.limits),
        said=SAID.get(request.query_params.get("said", "")),
    )


def followed(_request: Request) -> Followed:
    """Say how the figures of the system page are followed."""
    return Followed(key="system", read=_read, pieces=PIECES, fresh_seconds=FRESH_SECONDS)


def _read(conn: Conn) -> dict[str, Any]:
    return {
        "workers": worker_engines(conn),
        "storage": read_storage(conn),
        "runs": last_runs(conn, limit=1),
    }


@router.post("/system/invariants")
def run_invariants(operator: Steward, database: DatabaseDep) -> Response:
    """Check every invariant now; rules that take too long are left to the reconciler."""
    with snapshot(database, statement_seconds=RULE_SECONDS) as conn:
        if not claim_run(conn):
            msg = "The invariants are being checked now; load the page again in half a minute."
            raise ConflictError(msg)
        began_at, outcomes = started_at(conn), run_rules(conn, seconds_max=RUN_SECONDS)

    def note(conn: Conn) -> None:
        note_run(conn, began_at, outcomes, run_by=operator.name)
        count = {
            outcome: sum(rule.outcome == outcome for rule in outcomes)
            for outcome in ("true", "broken", "unfinished")
        }
        record(conn, operator, "invariants.run", "", after=count)

    database.run(note)
    return RedirectResponse(f"{PATH}/system?said=ran#invariants", 303)
