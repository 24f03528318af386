"""Routes of single Completions. Chat is not offered: its route says so and what to do instead."""

from typing import Annotated, NoReturn

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool

from app.accounts.access import Caller, require
from app.catalog.deps import CatalogDep
from app.completions.answer import completion_object
from app.completions.intake import (
    PreparedCompletion,
    load_vectors,
    model_name,
    prepare_completion,
)
from app.completions.openapi import COMPLETION_FIELDS
from app.completions.references import ReadCaptured, named_vectors, wanted_rows
from app.completions.waiting import ClientLeftError, Desk
from app.errors import InvalidRequestError, TooManyRequestsError
from app.kit.answers import json_answer
from app.kit.deps import BodyDep, DatabaseDep, SettingsDep
from app.kit.json_body import read_object
from app.kit.openapi import answer, documented, json_body, ref, sendable

router = APIRouter(tags=["completions"])
Sender = Annotated[Caller, Depends(require("completions"))]

WAITERS_MAX = 256  # Completions that one process waits for at once
CLIENT_LEFT = 499  # nobody reads it; it tells access logs why there was no answer


@router.post(
    "/v1/completions",
    **documented(
        {200: answer("The choices, and what was read.", ref("Completion"))},
        body=json_body(sendable(COMPLETION_FIELDS, required=("model", "prompt"))),
    ),
)
async def create_completion(
    request: Request,
    caller: Sender,
    *,
    body: BodyDep,
    database: DatabaseDep,
    settings: SettingsDep,
    catalog: CatalogDep,
) -> Response:
    """Run one Completion and answer when it has ended."""
    limits, account_id = settings.limits, caller.account_id
    desk: Desk = request.app.state.desk
    read_captured: ReadCaptured = request.app.state.captured.read

    def take_in() -> PreparedCompletion:
        sent = read_object(body, depth_max=limits.json_depth)
        model = catalog.get(model_name(sent))
        names = named_vectors([sent])
        stored = database.run(lambda conn: load_vectors(conn, account_id, names, limits))
        captured = read_captured(account_id, wanted_rows([sent]))
        tokenizer = catalog.tokenizer(model.name)
        prepared = prepare_completion(
            sent, model, tokenizer, limits, stored=stored, captured=captured
        )
        if prepared.stream:
            msg = "Streaming is not offered. Leave stream out, or send false."
            raise InvalidRequestError(msg, param="stream", code="stream_not_offered")
        desk.submit(account_id, prepared, seconds=settings.completion_seconds)
        return prepared

    if desk.waiting >= WAITERS_MAX:
        msg = f"{desk.waiting} Completions are waiting here already. Send it again later."
        raise TooManyRequestsError(msg, code="queue_full", retry_after=5)
    desk.waiting += 1
    try:
        prepared = await run_in_threadpool(take_in)
        outcomes = await desk.outcomes(request, prepared)
    except ClientLeftError:
        return Response(status_code=CLIENT_LEFT)
    finally:
        desk.waiting -= 1
    tokenizer = catalog.tokenizer(prepared.model.name)
    return await run_in_threadpool(
        lambda: json_answer(completion_object(prepared, outcomes, tokenizer))
    )


@router.post(
    "/v1/chat/completions",
    response_model=None,
    status_code=400,
    **documented({400: answer("Why not, and what to do instead.", ref("Error"))}),
)
def create_chat_completion() -> NoReturn:
    """Say that chat is not offered."""
    msg = (
        "Chat is not offered: the models are used as base models, so that every position of a "
        "prompt is known. Render the chat template yourself, for example with transformers: "
        "tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), and "
        "send the text as `prompt` with add_special_tokens: false (the template writes them)."
    )
    raise InvalidRequestError(msg, code="chat_not_offered")
