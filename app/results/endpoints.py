"""GET a Job's manifest and its files.

A path is looked up among the rows of the Job's live files and nowhere else, so what a path looks
like cannot matter. No connection to Postgres is held while bytes flow, and about 1 MiB of a file
is in memory at a time.
"""

import hashlib
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse

from app.accounts.access import Caller, require
from app.errors import NotFoundError, RangeError
from app.jobs.errors import no_job
from app.jobs.lifecycle import get_job
from app.jobs.records import Job, PublishedFile
from app.kit.answers import error_answer
from app.kit.db import Conn
from app.kit.deps import DatabaseDep
from app.kit.ids import parse_id
from app.results import openapi
from app.results.download import (
    ByteRange,
    UnsatisfiableRangeError,
    chosen_range,
    etag_of,
    file_headers,
    is_unchanged,
)
from app.results.manifest import find_file, listed_files, model_shape, render_manifest
from app.results.paths import MANIFEST
from app.storage import ObjectStore, job_key
from app.storage.deps import StoreDep

LINK_SECONDS = 3600  # how long a presigned link to a file on S3 works

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["results"])
ReaderDep = Annotated[Caller, Depends(require("jobs:read"))]
IfNoneMatch = Annotated[str | None, Header()]


@router.get("/manifest", **openapi.MANIFEST)
@router.head("/manifest", include_in_schema=False)
def get_manifest(
    job_id: str,
    caller: ReaderDep,
    database: DatabaseDep,
    store: StoreDep,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Answer with the manifest as it is now; after the Job's end it is the file manifest.json."""

    def read(conn: Conn) -> tuple[Job, PublishedFile | None, list[PublishedFile]]:
        job = _job_of(conn, job_id, caller)
        final = find_file(conn, job.id, MANIFEST) if job.state.is_terminal else None
        return job, final, [] if final else listed_files(conn, job.id)

    job, final, files = database.run(read, attempts=2)
    if final is not None:
        content, digest = store.get_bytes(job_key(job.id, MANIFEST)), final.sha256
    else:
        content = render_manifest(job, files, model_shape(store, job, files))
        digest = hashlib.sha256(content).hexdigest()
    headers = {"etag": etag_of(digest), "cache-control": "private, no-cache"}
    if is_unchanged(if_none_match, headers["etag"]):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="application/json", headers=headers)


@router.get("/files/{path:path}", **openapi.FILE)
@router.head("/files/{path:path}", include_in_schema=False)
def get_file(
    request: Request,
    job_id: str,
    path: str,
    *,
    caller: ReaderDep,
    database: DatabaseDep,
    store: StoreDep,
    if_none_match: IfNoneMatch = None,
    redirect: Annotated[
        bool, Query(description="false: always through this server, never by a link to S3.")
    ] = True,
) -> Response:
    """Answer with a file that the manifest lists, whole or one range of it."""

    def read(conn: Conn) -> tuple[UUID, PublishedFile]:
        job = _job_of(conn, job_id, caller)
        file = find_file(conn, job.id, path) if "\0" not in path else None
        if file is None:
            msg = f"Job {job_id} has no file {path[:200]!r}; its manifest lists those it has."
            raise NotFoundError(msg, param="path")
        return job.id, file

    owner, file = database.run(read, attempts=2)
    etag = etag_of(file.sha256)
    if is_unchanged(if_none_match, etag):
        return Response(status_code=304, headers={"etag": etag})
    if request.method == "HEAD":
        return Response(headers=file_headers(file, ByteRange(0, file.bytes, partial=False)))
    key = job_key(owner, file.path)
    link = store.presign(key, LINK_SECONDS) if redirect else None
    if link is not None:
        return RedirectResponse(link, status_code=302, headers={"cache-control": "no-store"})
    return _bytes_answer(request, store, key, file)


def _bytes_answer(request: Request, store: ObjectStore, key: str, file: PublishedFile) -> Response:
    asked, if_range = request.headers.get("range"), request.headers.get("if-range")
    try:
        part = chosen_range(asked, if_range, etag=etag_of(file.sha256), size=file.bytes)
    except UnsatisfiableRangeError:
        msg = f"{asked!r} lies outside the file, which has {file.bytes} bytes."
        return error_answer(
            request,
            RangeError(msg, param="range"),
            {"content-range": f"bytes */{file.bytes}"},
        )
    return StreamingResponse(
        store.stream_range(key, part.start, part.end),
        status_code=206 if part.partial else 200,
        headers=file_headers(file, part),
    )


def _job_of(conn: Conn, job_id: str, caller: Caller) -> Job:
    number = parse_id("job", job_id)
    job = None if number is None else get_job(conn, number, account_id=caller.account_id)
    if job is None:
        raise no_job(job_id)
    return job
