"""Routes of single Completions. Chat is not offered: its route says so and what to do instead."""

from typing import NoReturn

from fastapi import APIRouter

from app.errors import InvalidRequestError
from app.kit.openapi import answer, documented, ref

router = APIRouter(tags=["completions"])


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
