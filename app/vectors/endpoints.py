"""The routes of stored vectors: upload, list, read, download, delete."""

from typing import Annotated
from uuid import UUID

import orjson
from fastapi import APIRouter, Depends, Header, Request, Response

from app.accounts.access import Caller, CallerDep, require
from app.accounts.rate import CREATES_RATE
from app.errors import InvalidRequestError, NotFoundError
from app.jobs.idempotency import StoredAnswer, claim_key, find_answer, keep_answer, read_key
from app.kit.answers import json_answer
from app.kit.db import Conn, Database
from app.kit.deps import BodyDep, DatabaseDep, SettingsDep, work_on
from app.kit.pages import list_page, page_query, unknown_cursor
from app.settings import Limits
from app.steering.vectors import Vector
from app.vectors import openapi
from app.vectors.npy import write_npy
from app.vectors.stored import (
    StoredVector,
    delete_stored,
    find_stored,
    list_stored,
    store_upload,
    vector_facts,
    vector_object,
)
from app.vectors.upload import read_upload

PATH = "/v1/steering_vectors"
router = APIRouter(prefix=PATH, tags=["steering vectors"])
SCOPE = require("vectors")
Writer = Annotated[Caller, Depends(SCOPE)]
IfNoneMatch = Annotated[str | None, Header()]


@router.post(
    "",
    status_code=201,
    dependencies=[Depends(SCOPE), CREATES_RATE],
    **openapi.CREATE_VECTOR,
)
async def create_vector(
    request: Request, caller: Writer, *, body: BodyDep, database: DatabaseDep, settings: SettingsDep
) -> Response:
    """Store a vector: JSON, or a .npy or .safetensors file; the same numbers again give 200."""
    return await work_on(
        body, lambda: _create(request, caller.account_id, body, database, settings.limits)
    )


def _create(
    request: Request, account_id: UUID, body: bytes, database: Database, limits: Limits
) -> Response:
    content_type = request.headers.get("content-type")
    key = read_key(
        request.headers.getlist("idempotency-key"),
        f"POST {PATH}?{request.url.query} {content_type}",
        body,
        chars_max=limits.idempotency_key_chars,
    )
    if key is not None:
        earlier = database.run(lambda conn: find_answer(conn, account_id, key))
        if earlier is not None:
            return _stored(earlier, replayed=True)
    upload = read_upload(body, content_type, request.query_params, limits)

    def store(conn: Conn) -> tuple[StoredAnswer, bool]:
        if key is not None and (answer := claim_key(conn, account_id, key)) is not None:
            return answer, True
        stored, is_new = store_upload(conn, account_id, upload)
        content = orjson.dumps(vector_object(stored)).decode()
        answer = StoredAnswer(201 if is_new else 200, content)
        if key is not None:
            keep_answer(conn, account_id, key, answer)
        return answer, False

    answer, replayed = database.run(store)
    return _stored(answer, replayed=replayed)


@router.get("", **openapi.LIST_VECTORS)
def get_vectors(
    request: Request, caller: CallerDep, database: DatabaseDep, settings: SettingsDep
) -> Response:
    """List vectors, newest first; `interned` true: those that only Jobs brought along."""
    query = request.query_params
    page = page_query(query, limit_max=settings.limits.list_page)
    interned = {None: None, "true": True, "false": False}.get(query.get("interned"), "unknown")
    if isinstance(interned, str):
        msg = f"interned must be true or false, not {query['interned'][:50]!r}."
        raise InvalidRequestError(msg, param="interned")
    found = database.run(lambda conn: list_stored(conn, caller.account_id, page, interned=interned))
    if found is None:
        raise unknown_cursor(query["after"])
    items = [vector_object(stored) for stored in found[: page.limit]]
    return json_answer(list_page(items, has_more=len(found) > page.limit))


@router.get("/{vector_id}", **openapi.READ_VECTOR)
def get_vector(vector_id: str, caller: CallerDep, database: DatabaseDep) -> Response:
    """Describe a vector: shape, dtype, the norm of each row (the first 4,096), largest number."""
    stored, vector = _find(database, caller, vector_id)
    return json_answer({**vector_object(stored), **vector_facts(vector)})


@router.get("/{vector_id}/content", **openapi.READ_CONTENT)
@router.head("/{vector_id}/content", include_in_schema=False)
def get_content(
    vector_id: str, caller: CallerDep, database: DatabaseDep, if_none_match: IfNoneMatch = None
) -> Response:
    """Answer with the numbers as a .npy file of float32 (exact for bfloat16 too)."""
    stored, vector = _find(database, caller, vector_id)
    headers = {"etag": f'"{stored.id}"', "cache-control": "private, no-cache"}
    if if_none_match is not None and headers["etag"] in if_none_match:
        return Response(status_code=304, headers=headers)
    headers["content-disposition"] = f'attachment; filename="{stored.id}.npy"'
    headers["x-content-type-options"] = "nosniff"
    return Response(write_npy(vector), media_type="application/x-npy", headers=headers)


@router.delete("/{vector_id}", **openapi.DELETE_VECTOR)
def delete_vector(vector_id: str, caller: Writer, database: DatabaseDep) -> Response:
    """Delete a vector that no live Job uses."""
    if not database.run(lambda conn: delete_stored(conn, caller.account_id, vector_id)):
        raise _no_vector(vector_id)
    return json_answer({"id": vector_id, "object": "steering_vector", "deleted": True})


def _find(database: Database, caller: Caller, vector_id: str) -> tuple[StoredVector, Vector]:
    found = database.run(lambda conn: find_stored(conn, caller.account_id, vector_id))
    if found is None:
        raise _no_vector(vector_id)
    return found


def _no_vector(vector_id: str) -> NotFoundError:
    msg = f"There is no steering vector {vector_id[:100]!r} in this account."
    return NotFoundError(msg, param="vector_id")


def _stored(answer: StoredAnswer, *, replayed: bool) -> Response:
    # The id stands at the very beginning of the object.
    headers = {"location": f"{PATH}/{answer.body.split(chr(34), 4)[3]}"}
    if replayed:
        headers["idempotent-replayed"] = "true"
    return Response(answer.body, answer.status, headers, media_type="application/json")
