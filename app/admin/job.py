"""The page of one Job, its sample texts and files, and its cancel."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from app.admin.access import PATH, Operator, OperatorDep, operator_of, require_role
from app.admin.actions import CANCELLABLE, cancel_job
from app.admin.followed import JOB_PAGE, NOT_FOLLOWED, Context, Followed, live_at, stands_still
from app.admin.job_view_reads import (
    FILES_PAGE,
    JobPageView,
    list_files,
    read_job_page,
)
from app.admin.pages import partial, render
from app.admin.sample_texts import Pair, Part, choose, parts_of, read_samples
from app.errors import NotFoundError, RangeError
from app.jobs.lifecycle import get_job
from app.jobs.progress import accounting, job_object, status_reason
from app.jobs.records import Job, PublishedFile
from app.kit.db import Conn
from app.kit.deps import DatabaseDep
from app.kit.ids import parse_id, public_id
from app.results.download import UnsatisfiableRangeError, chosen_range, etag_of, file_headers
from app.results.manifest import find_file
from app.storage import job_key
from app.storage.deps import StoreDep

router = APIRouter(prefix="/jobs/{job_id}", dependencies=[Depends(operator_of)])
Steward = Annotated[Operator, Depends(require_role("operator"))]

LINK_SECONDS: Final = 600
PIECES: Final = {
    "state": "_job_state.html",
    "shards": "_job_shards.html",
    "errors": "_job_errors.html",
    "files": "_job_files.html",
    "about": "_job_about.html",
}
# Parts of the wall clock: key of the accounting, words, how they are drawn.
CLOCK: Final = (
    ("queued", "Waiting", "still"),
    ("engine_start", "Engine starting", "warn"),
    ("running", "Running", "busy"),
    ("publishing", "Finishing", "good"),
    ("rest", "Rest", "calm"),
)


@dataclass(frozen=True, slots=True)
class Event:
    """A point of a Job's timeline; `at` None: it lies ahead."""

    what: str
    at: datetime | None
    kind: str = ""
    note: str = ""


@router.get("")
def show_job(
    request: Request, job_id: str, *, operator: OperatorDep, database: DatabaseDep
) -> HTMLResponse:
    """Show a Job as it is now."""
    number = job_id_of(job_id)
    page = database.read(lambda conn: read_job_page(conn, number))
    if page is None:
        raise missing_job(job_id)
    return render(
        request,
        "job.html",
        **job_context(page),
        **(NOT_FOLLOWED if page.job.state.is_terminal else live_at("job", job=job_id)),
        may_cancel=operator.may("operator") and page.job.state in CANCELLABLE,
        said=request.query_params.get("said") == "cancelled",
    )


def followed(request: Request) -> Followed:
    """Say how a Job's page is followed, until the Job is over. Raises NotFoundError."""
    name = request.query_params.get("job", "")
    number = job_id_of(name)

    def read(conn: Conn) -> dict[str, Any] | None:
        page = read_job_page(conn, number)
        return None if page is None else job_context(page)

    return Followed(
        key=f"job {number.hex}",
        read=read,
        pieces=PIECES,
        is_over=is_over,
        missing=lambda: missing_job(name),
    )


def is_over(seen: dict[str, Any]) -> bool:
    """Tell whether nothing more will happen to the Job of a context."""
    job: Job = seen["job"]
    return job.state.is_terminal


@router.post("/cancel")
def cancel(job_id: str, operator: Steward, database: DatabaseDep) -> Response:
    """Cancel a Job; repeatable."""
    number = job_id_of(job_id)
    moved = database.run(lambda conn: cancel_job(conn, operator, number))
    return RedirectResponse(f"{PATH}/jobs/{job_id}{'?said=cancelled' if moved else ''}", 303)


@router.get("/samples")
def show_samples(
    request: Request,
    job_id: str,
    *,
    database: DatabaseDep,
    store: StoreDep,
) -> HTMLResponse:
    """Show a few texts; a piece of the Job's page, or a page of its own."""
    number = job_id_of(job_id)

    def read(conn: Conn) -> tuple[Job, list[Pair], list[Part]]:
        job = get_job(conn, number)
        if job is None:
            raise missing_job(job_id)
        pairs = choose(conn, number, job.n_total)
        indices = [item.index for pair in pairs for item in pair if item is not None]
        return job, pairs, parts_of(conn, number, indices)

    job, pairs, parts = database.read(read)
    samples = read_samples(store, number, pairs, parts)
    named: Context = {"job": job, "job_name": job_id, "samples": samples}
    if request.headers.get("hx-request") == "true":
        return partial(request, "_samples.html", **named)
    return render(request, "samples.html", **named, **beside_its_job(job))


@router.get("/files")
def show_files(request: Request, job_id: str, database: DatabaseDep) -> HTMLResponse:
    """List the files of a Job by path."""
    number = job_id_of(job_id)
    after = request.query_params.get("after")

    def read(conn: Conn) -> tuple[Job, list[PublishedFile]]:
        job = get_job(conn, number)
        if job is None:
            raise missing_job(job_id)
        return job, list_files(conn, number, limit=FILES_PAGE + 1, after=after)

    job, files = database.read(read)
    more = len(files) > FILES_PAGE
    return render(
        request,
        "files.html",
        job=job,
        job_name=job_id,
        files=files[:FILES_PAGE],
        after=files[FILES_PAGE - 1].path if more else None,
        first=after is None,
        **beside_its_job(job),
    )


@router.get("/files/{path:path}")
def download(
    request: Request,
    job_id: str,
    path: str,
    *,
    database: DatabaseDep,
    store: StoreDep,
) -> Response:
    """Answer with a file of a Job, or with a link to it that ends soon."""
    number = job_id_of(job_id)
    file = database.read(lambda conn: find_file(conn, number, path))
    if file is None:
        msg = f"Job {job_id} has no file {path[:200]!r}; its page lists those it has."
        raise NotFoundError(msg, param="path")
    key = job_key(number, file.path)
    link = store.presign(key, LINK_SECONDS)
    if link is not None:
        return RedirectResponse(link, 302, headers={"cache-control": "no-store"})
    asked, if_range = request.headers.get("range"), request.headers.get("if-range")
    try:
        part = chosen_range(asked, if_range, etag=etag_of(file.sha256), size=file.bytes)
    except UnsatisfiableRangeError:
        msg = f"{asked!r} lies outside the file, which has {file.bytes} bytes."
        raise RangeError(msg, param="range") from None
    return StreamingResponse(
        store.stream_range(key, part.start, part.end),
        status_code=206 if part.partial else 200,
        headers=file_headers(file, part),
    )


def beside_its_job(job: Job) -> Context:
    """Give the context of a page that is not followed, beside one of its Job that is."""
    if job.state.is_terminal:
        return NOT_FOLLOWED
    return stands_still(f"{PATH}/jobs/{public_id('job', job.id)}", JOB_PAGE)


def missing_job(name: str) -> NotFoundError:
    """Make the error for a Job that does not exist."""
    return NotFoundError(f"There is no Job {name[:80]!r}; the list shows those there are.")


def job_id_of(text: str) -> UUID:
    """Read the id of a Job in an address. Raises NotFoundError."""
    number = parse_id("job", text)
    if number is None:
        raise missing_job(text)
    return number


def job_context(page: JobPageView) -> dict[str, Any]:
    """Give what the templates of a Job's page need."""
    view = page.view
    clock = accounting(view)
    return {
        "page": page,
        "job": page.job,
        "job_name": public_id("job", page.job.id),
        "view": view,
        "reason": status_reason(view),
        "progress_facts": job_object(view)["progress"],
        "clock": [(label, kind, clock[name]) for name, label, kind in CLOCK],
        "clock_total": clock["total"],
        "timeline": _timeline(page),
    }


def _timeline(page: JobPageView) -> Sequence[Event]:
    """List what happened to a Job, in order, and what lies ahead."""
    job = page.job
    happened = [
        Event("Submitted", job.created_at),
        Event("First request started", job.started_at),
        Event("First part published", page.first_part_at),
        Event("Cancel asked for", job.cancel_requested_at, "bad"),
        Event("Time was over", job.expiry_began_at, "bad"),
        Event("Last request ended", job.ended_running_at),
        Event(
            job.state.value.capitalize(), job.finished_at, "bad" if job.state == "failed" else ""
        ),
    ]
    if page.view.first_ready is not None:
        happened.append(Event("Worker ready", page.view.first_ready[1]))
    events = sorted(
        (event for event in happened if event.at is not None),
        key=lambda event: event.at or job.created_at,
    )
    if not job.state.is_terminal and job.expiry_began_at is None:
        events.append(Event("Expires", job.expires_at, "ahead"))
    return events
