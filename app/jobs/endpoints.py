"""The routes of Jobs: submit, list, read, wait, cancel, and their requests."""

import asyncio
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool

from app.accounts.access import Caller, require
from app.accounts.rate import CREATES_RATE, REQUESTS_RATE
from app.catalog import Catalog
from app.catalog.deps import CatalogDep, NormsDep
from app.catalog.norms import TypicalNorms
from app.completions.references import ReadCaptured
from app.completions.unlisted import refuse_announced
from app.errors import InvalidRequestError, NotFoundError
from app.jobs import openapi
from app.jobs.errors import no_job
from app.jobs.idempotency import StoredAnswer, find_answer, read_key
from app.jobs.intake import load_named_vectors, prepare_job, store_job
from app.jobs.lifecycle import cancel_job as cancel
from app.jobs.progress import JobView, job_object, list_jobs, view_job
from app.jobs.references import wanted_rows
from app.jobs.requests import find_request, index_of, list_requests, read_index
from app.jobs.schemas import read_order
from app.jobs.states import JOB_TERMINAL, JobState, RequestState
from app.kit.answers import json_answer
from app.kit.db import Conn, Database
from app.kit.deps import BodyDep, DatabaseDep, SettingsDep, work_on
from app.kit.ids import parse_id, public_id
from app.kit.json_body import read_object
from app.kit.pages import PageQuery, list_page, page_query, unknown_cursor, whole_number
from app.settings import Settings

router = APIRouter(tags=["jobs"])
Reader = Annotated[Caller, Depends(require("jobs:read"))]
WRITES = require("jobs:write")
Writer = Annotated[Caller, Depends(WRITES)]

WAITERS_MAX = 200  # long polls of one process; more get the present state at once
WAIT_POLL_SECONDS = (0.1, 1.0)  # first and longest pause between two looks of a long poll


@router.post(
    "/v1/jobs",
    status_code=202,
    dependencies=[Depends(WRITES), CREATES_RATE],
    **openapi.CREATE_JOB,
)
async def create_job(
    request: Request,
    caller: Writer,
    *,
    body: BodyDep,
    database: DatabaseDep,
    settings: SettingsDep,
    catalog: CatalogDep,
    norms: NormsDep,
) -> Response:
    """Take in a Job: everything is validated, held and stored, or nothing is."""

    def take_in() -> Response:
        return _create(
            request,
            caller.account_id,
            body,
            database=database,
            settings=settings,
            catalog=catalog,
            norms=norms,
        )

    return await work_on(body, take_in)


def _create(
    request: Request,
    account_id: UUID,
    body: bytes,
    *,
    database: Database,
    settings: Settings,
    catalog: Catalog,
    norms: TypicalNorms,
) -> Response:
    limits = settings.limits
    key = read_key(
        request.headers.getlist("idempotency-key"),
        "POST /v1/jobs",
        body,
        chars_max=limits.idempotency_key_chars,
    )
    if key is not None:
        earlier = database.run(lambda conn: find_answer(conn, account_id, key))
        if earlier is not None:
            return _accepted(earlier, replayed=True)
    sent = read_object(body, depth_max=limits.json_depth, containers_max=limits.json_containers_job)
    order = read_order(sent, limits)
    if order.model not in catalog:
        database.run(lambda conn: refuse_announced(conn, order.model))
    model = catalog.get(order.model)
    stored = database.run(lambda conn: load_named_vectors(conn, account_id, order, settings.limits))
    read_captured: ReadCaptured = request.app.state.captured.read
    captured = read_captured(account_id, wanted_rows(order, limits))
    prepared = prepare_job(
        order,
        model,
        catalog.tokenizer(model.name),
        settings,
        stored=stored,
        captured=captured,
        norms=norms.of(model),
    )
    answer, replayed = database.run(
        lambda conn: store_job(conn, account_id, prepared, settings, key)
    )
    request.app.state.waker.wake(model.name)
    return _accepted(answer, replayed=replayed)


@router.get("/v1/jobs", **openapi.LIST_JOBS)
def get_jobs(
    request: Request, caller: Reader, database: DatabaseDep, settings: SettingsDep
) -> Response:
    """List Jobs, newest first; filters `status` and `model`."""
    query = request.query_params
    page = page_query(request.query_params, limit_max=settings.limits.list_page)
    state = _choice(JobState, query.get("status"))
    if page.after is not None:
        job_id = parse_id("job", page.after)
        if job_id is None:
            raise unknown_cursor(page.after)
        page = PageQuery(page.limit, str(job_id), page.order)

    def read(conn: Conn) -> list[JobView] | None:
        ids = list_jobs(conn, caller.account_id, page, state=state, model=query.get("model"))
        if ids is None:
            return None
        views = (view_job(conn, caller.account_id, job_id) for job_id in ids)
        return [view for view in views if view is not None]

    views = database.run(read)
    if views is None:
        raise unknown_cursor(query["after"])
    items = [job_object(view) for view in views[: page.limit]]
    return json_answer(list_page(items, has_more=len(views) > page.limit))


@router.get("/v1/jobs/{job_id}", **openapi.READ_JOB)
async def get_job(
    job_id: str, request: Request, caller: Reader, database: DatabaseDep, settings: SettingsDep
) -> Response:
    """Read a Job; `?wait=N` answers when it changes or ends, after N seconds at the latest."""
    found = _job_id(job_id)
    wait = request.query_params.get("wait")
    seconds = 0 if wait is None else whole_number("wait", wait, 0, settings.limits.wait_seconds)
    known = request.headers.get("if-none-match")
    view = await run_in_threadpool(_view, database, caller.account_id, found)
    if seconds:
        view = await _wait_for_change(request, view, known or view.etag, seconds)
    headers = {"etag": view.etag, "cache-control": "no-cache"}
    if known == view.etag:
        return Response(status_code=304, headers=headers)
    return json_answer(job_object(view), headers=headers)


@router.post(
    "/v1/jobs/{job_id}/cancel", dependencies=[Depends(WRITES), REQUESTS_RATE], **openapi.CANCEL_JOB
)
def cancel_job(job_id: str, caller: Writer, database: DatabaseDep) -> Response:
    """Cancel a Job; repeatable, and a finished Job stays as it is."""
    found = _job_id(job_id)
    database.run(lambda conn: cancel(conn, found, account_id=caller.account_id))
    return json_answer(job_object(_view(database, caller.account_id, found)))


@router.get("/v1/jobs/{job_id}/requests", **openapi.LIST_REQUESTS)
def get_requests(
    job_id: str, request: Request, caller: Reader, database: DatabaseDep, settings: SettingsDep
) -> Response:
    """List requests of a Job in index order; filters `status` and `custom_id`."""
    found = _job_id(job_id)
    query = request.query_params
    page = page_query(request.query_params, limit_max=settings.limits.list_page, newest=False)
    if page.order == "desc":
        msg = "Requests are listed in ascending order of their index only."
        raise InvalidRequestError(msg, param="order")
    state = _choice(RequestState, query.get("status"))
    after = -1
    if page.after is not None:
        index = index_of(found, page.after)
        if index is None:
            raise unknown_cursor(page.after)
        after = index
    _view(database, caller.account_id, found)
    items = database.run(
        lambda conn: list_requests(
            conn,
            found,
            after=after,
            limit=page.limit,
            state=state,
            custom_id=query.get("custom_id"),
        )
    )
    return json_answer(list_page(items[: page.limit], has_more=len(items) > page.limit))


@router.get("/v1/jobs/{job_id}/requests/{index}", **openapi.READ_REQUEST)
def get_request(job_id: str, index: str, caller: Reader, database: DatabaseDep) -> Response:
    """Read one request of a Job: what it asked for, where it stands, its Hold."""
    found = _job_id(job_id)
    _view(database, caller.account_id, found)
    number = read_index(index)
    item = None
    if number is not None:
        item = database.run(lambda conn: find_request(conn, found, number))
    if item is None:
        msg = (
            f"The Job has no request {index[:40]!r}; requests are numbered 0, 1, 2, … without "
            "leading zeros."
        )
        raise NotFoundError(msg, param="index")
    return json_answer(item)


async def _wait_for_change(request: Request, view: JobView, known: str, seconds: int) -> JobView:
    """Look again and again, ever more slowly, until the Job differs from `known` or ends."""
    state = request.app.state
    if state.waiters >= WAITERS_MAX:
        return view
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    pause, pause_max = WAIT_POLL_SECONDS
    state.waiters += 1
    try:
        while view.etag == known and view.job.state not in JOB_TERMINAL:
            left = deadline - loop.time()
            if left <= 0 or await request.is_disconnected():
                break
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 1.5, pause_max)
            view = await run_in_threadpool(_view, state.database, view.job.account_id, view.job.id)
    finally:
        state.waiters -= 1
    return view


def _view(database: Database, account_id: UUID, job_id: UUID) -> JobView:
    view = database.run(lambda conn: view_job(conn, account_id, job_id))
    if view is None:
        raise no_job(public_id("job", job_id))
    return view


def _job_id(text: str) -> UUID:
    job_id = parse_id("job", text)
    if job_id is None:
        raise no_job(text)
    return job_id


def _accepted(answer: StoredAnswer, *, replayed: bool) -> Response:
    # The id stands at the very beginning of a Job object.
    job_id = answer.body.split('"', 4)[3]
    headers = {"location": f"/v1/jobs/{job_id}", "retry-after": "1"}
    if replayed:
        headers["idempotent-replayed"] = "true"
    return Response(answer.body, answer.status, headers, media_type="application/json")


def _choice(states: type[JobState] | type[RequestState], text: str | None) -> str | None:
    if text is None:
        return None
    if text not in list(states):
        msg = f"status must be one of {', '.join(states)}, not {text[:50]!r}."
        raise InvalidRequestError(msg, param="status")
    return text
