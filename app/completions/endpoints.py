"""Routes of single Completions. Chat is not offered: its route says so and what to do instead."""

import asyncio
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool

from app.accounts.access import Caller, CallerDep, require
from app.accounts.places import Places
from app.accounts.rate import COMPLETIONS_RATE
from app.catalog import Catalog
from app.catalog.deps import CatalogDep, NormsDep
from app.completions.answer import completion_object
from app.completions.intake import (
    PreparedCompletion,
    load_vectors,
    model_name,
    prepare_completion,
)
from app.completions.openapi import CREATE_COMPLETION
from app.completions.references import ReadCaptured, captured_of, vectors_of
from app.completions.stream_answer import Writer, stream_answer
from app.completions.stream_chunks import ChunkWriter, WrittenChunks
from app.completions.unlisted import UnlistedCompletion, is_announced, prepare_unlisted
from app.completions.waiting import ClientLeftError, Desk
from app.errors import InvalidRequestError, RequestTimeoutError
from app.kit.answers import error_answer, json_answer
from app.kit.deps import DatabaseDep, SettingsDep, body_of, work_on
from app.kit.json_body import read_object
from app.kit.openapi import answer, documented, ref

router = APIRouter(tags=["completions"])
SCOPE = require("completions")
Sender = Annotated[Caller, Depends(SCOPE)]

CLIENT_LEFT = 499  # nobody reads it; it tells access logs why there was no answer


@router.post(
    "/v1/completions", dependencies=[Depends(SCOPE), COMPLETIONS_RATE], **CREATE_COMPLETION
)
async def create_completion(
    request: Request,
    caller: Sender,
    *,
    database: DatabaseDep,
    settings: SettingsDep,
    catalog: CatalogDep,
    norms: NormsDep,
) -> Response:
    """Run one Completion and answer when it has ended; with `stream`, as its tokens come."""
    limits, account_id = settings.limits, caller.account_id
    desk: Desk = request.app.state.desk
    places: Places = request.app.state.places
    read_captured: ReadCaptured = request.app.state.captured_alone.read

    def take_in(body: bytes) -> PreparedCompletion | UnlistedCompletion:
        sent = read_object(body, depth_max=limits.json_depth, containers_max=limits.json_containers)
        name = model_name(sent)
        if name not in catalog and database.run(lambda conn: is_announced(conn, name)):
            unlisted = prepare_unlisted(sent, name, limits)
            desk.submit_unlisted(account_id, unlisted, seconds=settings.completion_seconds)
            return unlisted
        model = catalog.get(name)
        prepared = prepare_completion(
            sent,
            model,
            catalog.tokenizer(model.name),
            limits,
            stored=vectors_of(
                sent,
                limits,
                lambda names: database.run(
                    lambda conn: load_vectors(conn, account_id, names, limits)
                ),
            ),
            captured=captured_of(sent, limits, lambda rows: read_captured(account_id, rows)),
            norms=norms.of(model),
        )
        desk.submit(account_id, prepared, seconds=settings.completion_seconds)
        return prepared

    with ExitStack() as place:
        # Before the body is read: one that finds no place must not fill the memory.
        place.enter_context(places.taken(account_id, caller.key_id))
        try:
            body = await _body_in_time(request, limits.body_seconds)
            prepared = await work_on(body, lambda: take_in(body))
            if prepared.stream:
                make_writer = partial(_chunk_writer, prepared, catalog)
                # The place is kept until the last byte is out, or the client has left.
                kept = place.pop_all()
                try:
                    return await stream_answer(
                        request, desk, prepared, make_writer, on_close=kept.close
                    )
                except BaseException:
                    kept.close()
                    raise
            outcomes = await desk.outcomes(request, prepared)
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT)
        except RequestTimeoutError as error:
            return error_answer(request, error, {"connection": "close"})
    return await run_in_threadpool(lambda: json_answer(_written(prepared, outcomes, catalog)))


async def _body_in_time(request: Request, seconds: float) -> bytes:
    """Read the body. Raises RequestTimeoutError: one that trickles in must not keep its place."""
    try:
        async with asyncio.timeout(seconds):
            return await body_of(request)
    except TimeoutError:
        msg = (
            f"The body did not arrive within {seconds} s (body_seconds in GET /v1/limits). Send it "
            "again, with vectors encoded or stored where it is large."
        )
        raise RequestTimeoutError(msg) from None


def _chunk_writer(prepared: PreparedCompletion | UnlistedCompletion, catalog: Catalog) -> Writer:
    if isinstance(prepared, UnlistedCompletion):
        return WrittenChunks()
    return ChunkWriter(prepared, catalog.tokenizer(prepared.model.name))


def _written(
    prepared: PreparedCompletion | UnlistedCompletion, outcomes: Any, catalog: Catalog
) -> dict[str, Any]:
    """Write the answer; that of an unlisted model was written by its worker."""
    if isinstance(prepared, UnlistedCompletion):
        return dict(outcomes)
    return completion_object(prepared, outcomes, catalog.tokenizer(prepared.model.name))


@router.post(
    "/v1/chat/completions",
    response_model=None,
    status_code=400,
    **documented({400: answer("Why not, and what to do instead.", ref("Error"))}),
)
def create_chat_completion(caller: CallerDep) -> NoReturn:
    """Say that chat is not offered."""
    del caller  # as everywhere, only who has a key gets an answer
    msg = (
        "Chat is not offered: the models are used as base models, so that every position of a "
        "prompt is known. Render the chat template yourself, for example with transformers: "
        "tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), and "
        "send the text as `prompt` with add_special_tokens: false (the template writes them)."
    )
    raise InvalidRequestError(msg, code="chat_not_offered")
