"""Takes a completions body in: every rule is checked before a row or a Hold exists.

Several prompts become several request specs, in their order. The numbers of Steering vectors
that came along are stored under their names, as a Job's are: workers read them from there.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from app.catalog import ServedModel, Tokenizer
from app.completions.dose import Doses
from app.completions.problems import Problem, shown
from app.completions.rows_of import RowsOf
from app.completions.spec import RequestSpec
from app.completions.validate import Validator
from app.errors import ContextLengthError, InvalidRequestError
from app.kit.db import Conn
from app.kit.ids import new_uuid
from app.settings import Limits
from app.steering.vectors import Vector, find_vectors, vectors_size

STREAM_OPTIONS = frozenset({"include_usage"})


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A Completion in which everything is valid; its id is made here, so storing may be repeated.

    `specs` has one request for each prompt.
    """

    model: ServedModel
    specs: tuple[RequestSpec, ...]
    vectors: Mapping[str, Vector]
    return_token_ids: bool
    stream: bool
    include_usage: bool
    id: UUID = field(default_factory=new_uuid)


def model_name(body: Mapping[str, Any]) -> str:
    """Read the name of the model. Raises InvalidRequestError."""
    name = body.get("model")
    if not isinstance(name, str):
        what = "model is missing" if name is None else f"model must be a string, not {shown(name)}"
        msg = f"{what}. GET /v1/models lists the models."
        raise InvalidRequestError(msg, param="model")
    return name


def load_vectors(
    conn: Conn, account_id: UUID, names: Collection[str], limits: Limits
) -> dict[str, Vector]:
    """Read the stored vectors that a body names. Raises InvalidRequestError for too many."""
    size = vectors_size(conn, account_id, names)
    if size > limits.named_bytes_completion:
        msg = (
            f"The request names stored vectors of {size} bytes in all; at most "
            f"{limits.named_bytes_completion} are allowed. Name fewer."
        )
        raise InvalidRequestError(msg, code="named_vectors_too_large")
    return find_vectors(conn, account_id, names)


def prepare_completion(
    body: Mapping[str, Any],
    model: ServedModel,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    stored: Mapping[str, Vector],
    captured: Mapping[RowsOf, Vector | str],
    norms: Sequence[float] | None = None,
) -> PreparedCompletion:
    """Validate a body. Raises InvalidRequestError naming the first rule that it breaks."""
    validator = Validator(model, tokenizer, limits, stored=stored, captured=captured, is_job=False)
    (outcome,) = validator.check([body])
    _raise_first(outcome)
    stream, include_usage = stream_fields(body)
    outcomes: list[RequestSpec | list[Problem]]
    if isinstance(outcome, RequestSpec):
        outcomes = [outcome]
    else:  # nothing is wrong, so there are several prompts
        prompts = body["prompt"]
        refuse_too_many(len(prompts), body.get("n") or 1, limits)
        outcomes = validator.check([{**body, "prompt": prompt} for prompt in prompts])
    doses = Doses(norms, stored, validator.vectors)
    specs: list[RequestSpec] = []
    for each in outcomes:
        _raise_first(each)
        assert isinstance(each, RequestSpec)
        specs.append(doses.warned(_with_echo(each)))
    _refuse_long_logprobs(body, specs, limits)
    return PreparedCompletion(
        model=model,
        specs=tuple(specs),
        vectors=validator.vectors,
        return_token_ids=body.get("return_token_ids") is True,
        stream=stream,
        include_usage=include_usage,
    )


def _raise_first(outcome: RequestSpec | list[Problem]) -> None:
    if isinstance(outcome, RequestSpec) or not outcome:
        return
    first = outcome[0]
    kind = ContextLengthError if first.code == ContextLengthError.code else InvalidRequestError
    raise kind(first.message, param=first.param, code=first.code)


def refuse_too_many(prompts: int, n: int, limits: Limits) -> None:
    """Refuse more choices than one Completion may have. Raises InvalidRequestError."""
    if prompts * n > limits.choices:
        msg = (
            f"{prompts} prompts with n: {n} make {prompts * n} choices; at most {limits.choices} "
            "are allowed in one request. Send fewer prompts, or a Job."
        )
        raise InvalidRequestError(msg, param="prompt")


def _refuse_long_logprobs(
    body: Mapping[str, Any], specs: Sequence[RequestSpec], limits: Limits
) -> None:
    """Refuse more alternatives than one answer may list. Raises InvalidRequestError.

    Each choice of an answer lists its prompt's alternatives again.
    """
    entries = 0
    for spec in specs:
        sampling = spec.sampling
        of_prompt = spec.prompt_tokens * _listed(sampling.prompt_logprobs)
        entries += sampling.n * (of_prompt + sampling.max_tokens * _listed(sampling.logprobs))
    if entries > limits.logprob_entries:
        msg = (
            f"The request asks for up to {entries} log-probabilities; at most "
            f"{limits.logprob_entries} are allowed. Lower logprobs, prompt_logprobs, n or "
            "max_tokens."
        )
        has_prompt = body.get("prompt_logprobs") is not None
        raise InvalidRequestError(msg, param="prompt_logprobs" if has_prompt else "logprobs")


def _listed(count: int | None) -> int:
    """Count the alternatives of a token: `count` and its own."""
    return 0 if count is None else count + 1


def _with_echo(spec: RequestSpec) -> RequestSpec:
    """Ask for the prompt's logprobs too where the echoed prompt needs them."""
    sampling = spec.sampling
    if not sampling.echo or sampling.logprobs is None:
        return spec
    wanted = max(sampling.logprobs, sampling.prompt_logprobs or 0)
    return replace(spec, sampling=replace(sampling, prompt_logprobs=wanted))


def stream_fields(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Read `stream` and `stream_options`: whether to stream, and whether to add usage.

    Raises InvalidRequestError.
    """
    stream, options = body.get("stream"), body.get("stream_options")
    if stream is not None and not isinstance(stream, bool):
        msg = f"stream must be true or false, not {shown(stream)}."
        raise InvalidRequestError(msg, param="stream")
    if options is None:
        return stream is True, False
    if stream is not True:
        msg = "stream_options is allowed only with stream: true."
        raise InvalidRequestError(msg, param="stream_options")
    if not isinstance(options, dict) or not options.keys() <= STREAM_OPTIONS:
        msg = f'stream_options must be {{"include_usage": true or false}}, not {shown(options)}.'
        raise InvalidRequestError(msg, param="stream_options")
    usage = options.get("include_usage")
    if usage is not None and not isinstance(usage, bool):
        msg = f"stream_options.include_usage must be true or false, not {shown(usage)}."
        raise InvalidRequestError(msg, param="stream_options")
    return True, usage is True
