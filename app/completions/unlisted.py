"""Completions of models that no models.toml of this process names, but that a worker serves.

The API knows neither layers nor tokenizer of such a model: it holds an upper bound and passes the
body on. The worker checks it by the same rules with its own model, and its refusal is passed on,
with the Hold released; what is charged is what its engine counted. The worker writes the answer,
too, and the chunks of a stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from app.completions.intake import refuse_too_many, stream_fields
from app.completions.problems import is_int, shown
from app.completions.prompts import (
    FORMS,
    larger_than_any_prompt,
    more_prompts_than_any_route_takes,
)
from app.completions.validate import MAX_TOKENS_DEFAULT
from app.errors import InvalidRequestError
from app.kit.db import Conn
from app.kit.ids import new_uuid
from app.settings import Limits

HEARD_SECONDS = 60  # a worker that was silent for longer announces nothing
TOKENS_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class UnlistedCompletion:
    """A Completion that its worker will check.

    `prompt_tokens` is at least what any tokenizer makes of the prompts (UTF-8 bytes, or ids), but
    for special tokens that it adds.
    """

    model: str
    body: Mapping[str, Any]
    prompt_tokens: int
    tokens_held: int
    stream: bool = False
    id: UUID = field(default_factory=new_uuid)


def is_announced(conn: Conn, model: str) -> bool:
    """Tell whether a worker says that it serves a model, ready or not."""
    row = conn.execute(
        """
        SELECT 1 FROM workers WHERE model = %s AND state <> 'gone'
            AND heartbeat_at > clock_timestamp() - make_interval(secs => %s) LIMIT 1
        """,
        [model, HEARD_SECONDS],
    ).fetchone()
    return row is not None


def refuse_announced(conn: Conn, model: str) -> None:
    """Refuse a Job of a model that a worker serves but this process does not know.

    Raises InvalidRequestError.
    """
    if is_announced(conn, model):
        raise not_listed(model)


def not_listed(model: str) -> InvalidRequestError:
    """Make the error for a Job of a model that GET /v1/models does not list."""
    msg = (
        f"{model[:200]} is served, but not listed, and takes single Completions alone. "
        "GET /v1/models lists the models that take Jobs."
    )
    return InvalidRequestError(msg, param="model", code="model_not_listed")


def prepare_unlisted(body: Mapping[str, Any], model: str, limits: Limits) -> UnlistedCompletion:
    """Count what a body may cost at most. Raises InvalidRequestError where that cannot be told."""
    stream, _ = stream_fields(body)
    prompts = _prompts(body.get("prompt"))
    too_many = more_prompts_than_any_route_takes(len(prompts), limits)
    if too_many is not None:
        raise InvalidRequestError(too_many.message, param=too_many.param)
    bounds = [_bound(prompt) for prompt in prompts]
    texts = (bound for bound, p in zip(bounds, prompts, strict=True) if isinstance(p, str))
    too_large = larger_than_any_prompt(sum(texts), limits)
    if too_large is not None:
        raise InvalidRequestError(too_large.message, param=too_large.param)
    max_tokens = _whole(body, "max_tokens", MAX_TOKENS_DEFAULT, TOKENS_MAX)
    n = _whole(body, "n", 1, limits.choices)
    refuse_too_many(len(bounds), n, limits)
    tokens = sum(bounds)
    held = tokens + len(bounds) * n * max_tokens
    return UnlistedCompletion(model, body, tokens, held, stream)


def _prompts(sent: Any) -> list[Any]:
    if sent is None:
        msg = f"prompt is missing. Send {FORMS}."
        raise InvalidRequestError(msg, param="prompt")
    several = isinstance(sent, list) and sent and not is_int(sent[0])
    return list(sent) if several else [sent]


def _bound(prompt: Any) -> int:
    """Bound the tokens of one prompt; at least 1, because an empty text may get a BOS."""
    if isinstance(prompt, str):
        return max(1, len(prompt.encode()))
    if isinstance(prompt, list) and all(map(is_int, prompt)):
        return max(1, len(prompt))
    msg = f"prompt must be {FORMS}, not {shown(prompt)}."
    raise InvalidRequestError(msg, param="prompt")


def _whole(body: Mapping[str, Any], name: str, default: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not is_int(value) or not 1 <= value <= most:
        msg = f"{name} must be a whole number from 1 to {most}, not {shown(value)}."
        raise InvalidRequestError(msg, param=name)
    return int(value)
