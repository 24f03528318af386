"""The requests of a Job: a list with filters, and one request with everything known of it."""

from typing import Any, Final
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from app.admin.access import PATH, operator_of
from app.admin.followed import NOT_FOLLOWED, Followed, live_at, stands_still
from app.admin.job import beside_its_job, is_over, job_id_of, missing_job
from app.admin.pages import render
from app.admin.request_reads import (
    RequestFilter,
    RequestPage,
    RequestView,
    list_page,
    view_request,
)
from app.admin.sample_texts import Part, parts_of, read_text
from app.admin.steering_words import captures_in_words, sampling_in_words, steering_in_words
from app.completions.spec import spec_from_json
from app.errors import InvalidRequestError, NotFoundError
from app.jobs.lifecycle import get_job
from app.jobs.records import Job
from app.jobs.requests import read_index
from app.jobs.states import RequestState
from app.kit.db import Conn
from app.kit.deps import DatabaseDep
from app.kit.ids import public_id
from app.storage.deps import StoreDep

router = APIRouter(prefix="/jobs/{job_id}/requests", dependencies=[Depends(operator_of)])

TEXT_MAX: Final = 200
FIELDS: Final = ("status", "code", "custom_id")
TOKENS_SHOWN: Final = 200
PIECES: Final = {"counts": "_request_counts.html", "requests": "_request_list.html"}


@router.get("")
def show_requests(request: Request, job_id: str, database: DatabaseDep) -> HTMLResponse:
    """List requests of a Job by index."""
    number = job_id_of(job_id)
    asked = _asked(request)
    after = _after(request.query_params.get("after"))
    context = database.read(lambda conn: _read(conn, number, asked, after))
    if context is None:
        raise missing_job(job_id)
    if is_over(context):
        moves = NOT_FOLLOWED
    elif after >= 0:
        moves = stands_still(_address(number, asked))
    else:
        moves = live_at("requests", job=job_id, **_query(asked))
    return render(
        request,
        "requests.html",
        **context,
        **moves,
        states=[(state.value, state.value.capitalize()) for state in RequestState],
    )


def followed(request: Request) -> Followed:
    """Say how the first page of a Job's requests is followed, until the Job is over.

    Raises NotFoundError, InvalidRequestError.
    """
    name = request.query_params.get("job", "")
    number, asked = job_id_of(name), _asked(request)
    _filter(asked)
    return Followed(
        key=f"requests {number.hex} {urlencode(_query(asked))}",
        read=lambda conn: _read(conn, number, asked, -1),
        pieces=PIECES,
        is_over=is_over,
        missing=lambda: missing_job(name),
    )


def _read(conn: Conn, number: UUID, asked: dict[str, str], after: int) -> dict[str, Any] | None:
    """Read a page of requests and what its templates need; None when there is no such Job."""
    job = get_job(conn, number)
    if job is None:
        return None
    chosen = _filter(asked)
    page = RequestPage([], None)
    if chosen.state is None or _how_many(job, chosen.state) != 0:
        page = list_page(conn, number, chosen, total=job.n_total, after=after)
    older = None
    if page.next is not None:
        older = _address(number, {**asked, "after": str(page.next)})
    return {
        "job": job,
        "job_name": public_id("job", number),
        "page": page,
        "asked": asked,
        "older": older,
        "first": None if after < 0 else _address(number, asked),
    }


def _how_many(job: Job, state: RequestState) -> int | None:
    """Count the requests that ended in this state, as the Job says; None for one that is no end."""
    counts = {
        RequestState.succeeded: job.n_succeeded,
        RequestState.errored: job.n_errored,
        RequestState.cancelled: job.n_cancelled,
        RequestState.expired: job.n_expired,
    }
    return counts.get(state)


def _address(number: UUID, asked: dict[str, str]) -> str:
    return f"{PATH}/jobs/{public_id('job', number)}/requests?{urlencode(_query(asked))}"


def _query(asked: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in asked.items() if value}


def _asked(request: Request) -> dict[str, str]:
    return {n: request.query_params.get(n, "").strip()[:TEXT_MAX] for n in FIELDS}


@router.get("/{index}")
def show_request(
    request: Request,
    job_id: str,
    index: str,
    *,
    database: DatabaseDep,
    store: StoreDep,
) -> HTMLResponse:
    """Show one request: what was asked, where it stands, what it wrote, what it cost."""
    number = job_id_of(job_id)
    place = read_index(index)

    def read(conn: Conn) -> tuple[Job, RequestView | None, list[Part]]:
        job = get_job(conn, number)
        if job is None:
            raise missing_job(job_id)
        view = None if place is None else view_request(conn, number, place)
        parts = parts_of(conn, number, [place]) if view and place is not None else []
        return job, view, parts

    job, view, parts = database.read(read)
    if view is None or place is None:
        msg = (
            f"Job {job_id} has no request {index[:40]!r}; requests are numbered 0, 1, 2, … without "
            "leading zeros."
        )
        raise NotFoundError(msg, param="index")
    spec = spec_from_json(view.request["spec"])
    return render(
        request,
        "request.html",
        **(NOT_FOLLOWED if view.finished_at else beside_its_job(job)),
        job=job,
        job_name=job_id,
        view=view,
        item=view.request,
        steering=steering_in_words(spec),
        captures=captures_in_words(spec),
        sampling=sampling_in_words(spec.sampling),
        prompt=spec.prompt,
        token_ids=spec.prompt_token_ids[:TOKENS_SHOWN],
        token_ids_left=max(0, spec.prompt_tokens - TOKENS_SHOWN),
        warnings=spec.warnings,
        texts=read_text(store, number, parts, place),
        spec_json={**view.request["spec"], "prompt_token_ids": f"{spec.prompt_tokens} ids"},
    )


def _filter(asked: dict[str, str]) -> RequestFilter:
    if asked["status"] not in ("", *RequestState):
        msg = f"status must be one of {', '.join(RequestState)}."
        raise InvalidRequestError(msg, param="status")
    state = RequestState(asked["status"]) if asked["status"] else None
    return RequestFilter(state, asked["code"] or None, asked["custom_id"] or None)


def _after(text: str | None) -> int:
    if not text:
        return -1
    index = read_index(text)
    if index is None:
        msg = "after is not an index of this list; begin with its first page."
        raise InvalidRequestError(msg, param="after")
    return index
