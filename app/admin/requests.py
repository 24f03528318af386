"""The requests of a Job: a list with filters, and one request with everything known of it."""

from typing import Final
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from app.admin.access import PATH, operator_of
from app.admin.job import job_id_of, missing_job
from app.admin.pages import render
from app.admin.request_reads import (
    PAGE,
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
from app.storage.deps import StoreDep

router = APIRouter(prefix="/jobs/{job_id}/requests", dependencies=[Depends(operator_of)])

TEXT_MAX: Final = 200
FIELDS: Final = ("status", "code", "custom_id")
TOKENS_SHOWN: Final = 200


@router.get("")
def show_requests(request: Request, job_id: str, database: DatabaseDep) -> HTMLResponse:
    """List requests of a Job by index."""
    number = job_id_of(job_id)
    asked = {n: request.query_params.get(n, "").strip()[:TEXT_MAX] for n in FIELDS}
    chosen = _filter(asked)
    after = _after(request.query_params.get("after"))

    def read(conn: Conn) -> tuple[Job, RequestPage]:
        job = get_job(conn, number)
        if job is None:
            raise missing_job(job_id)
        return job, list_page(conn, number, chosen, total=job.n_total, after=after)

    job, page = database.run(read)
    here = f"{PATH}/jobs/{job_id}/requests"
    query = {name: value for name, value in asked.items() if value}
    return render(
        request,
        "requests.html",
        job=job,
        job_name=job_id,
        page=page,
        page_size=PAGE,
        asked=asked,
        states=[(state.value, state.value.capitalize()) for state in RequestState],
        older=(None if page.next is None else f"{here}?{urlencode({**query, 'after': page.next})}"),
        first=None if after < 0 else f"{here}?{urlencode(query)}",
    )


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

    job, view, parts = database.run(read)
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
