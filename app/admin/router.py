"""Every route of the dashboard, under /admin: one router a page."""

from fastapi import APIRouter
from fastapi.responses import RedirectResponse

from app.admin import (
    accounts,
    audit_pages,
    job,
    jobs,
    key_forms,
    live,
    login,
    models,
    overview,
    requests,
    static_files,
    system,
    workers,
)
from app.admin.access import PATH

PAGES = (
    login,
    overview,
    jobs,  # before `job`: /jobs/cancel is no Job
    job,
    requests,
    workers,
    models,
    live,
    accounts,
    key_forms,
    audit_pages,
    system,
    static_files,
)

router = APIRouter()
for page in PAGES:
    router.include_router(page.router, prefix=PATH)


@router.get(f"{PATH}/")
def leave_out_the_slash() -> RedirectResponse:
    """Lead to the first page."""
    return RedirectResponse(PATH, 308)
