"""The system page: versions, settings, limits, storage, and the invariants with their last run."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.admin.access import LOGGED_IN, PATH, Operator, require_role
from app.admin.audit import record
from app.admin.pages import render
from app.admin.system_reads import own_versions, read_storage, shown_settings, worker_engines
from app.errors import ConflictError
from app.jobs.audit_runs import claim_run, last_runs, note_run, run_rules, snapshot, started_at
from app.kit.db import Conn
from app.kit.deps import DatabaseDep, SettingsDep

router = APIRouter()
Steward = Annotated[Operator, Depends(require_role("operator"))]

RUNS_SHOWN: Final = 10
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
        workers=database.run(worker_engines),
        storage=database.run(read_storage),
        settings=shown_settings(settings),
        limits=shown_settings(settings.limits),
        runs=database.run(lambda conn: last_runs(conn, limit=RUNS_SHOWN)),
        said=SAID.get(request.query_params.get("said", "")),
    )


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
