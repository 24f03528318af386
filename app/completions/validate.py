"""The one validator of a completions body: raw JSON in, a RequestSpec or all its problems out.

POST /v1/completions and Jobs use the same rules. Requests go through in batches, because counting
tokens is quick only for many texts at once. Nothing is stored here; the numbers that requests
brought along are in `vectors` afterwards, by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.catalog import ServedModel, Tokenizer
from app.completions.captures import capture_bytes, read_captures
from app.completions.problems import Problem, RefusedError, shown, unknown_fields
from app.completions.prompts import Prompt, read_prompts
from app.completions.sampling import SamplingRules
from app.completions.spec import RequestSpec, Sampling
from app.completions.steering import PARAM as STEERING
from app.completions.steering import Steering, SteeringRules
from app.settings import Limits
from app.steering.spec import Capture
from app.steering.vectors import Vector

MAX_TOKENS_DEFAULT = 16
DOUBLE_BOS = "double_bos"
# Rules about n and several prompts name the first of these that is present.
READS_AND_WRITES = ("output_residual_stream", "captures", STEERING, "interventions")
OTHER_FIELDS = (
    "model", "prompt", "add_special_tokens", "return_token_ids", "user", "stream",
    "stream_options", *READS_AND_WRITES,
)  # fmt: skip
STREAM_FIELDS = frozenset({"stream", "stream_options"})
USER_CHARS_MAX = 512


@dataclass(slots=True)
class Draft:
    """A body after the rules that need no token count."""

    problems: list[Problem]
    prompt: Prompt | None
    add_special_tokens: bool
    sampling: dict[str, Any]
    captures: tuple[Capture, ...]
    steering: Steering | None
    token_ids: tuple[int, ...] = ()


class Validator:
    """Checks the requests of one model for one account."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        stored: Mapping[str, Vector],
        is_job: bool,
    ) -> None:
        """Bind everything that rules look at; `stored` holds the stored vectors that are named."""
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits
        self._sampling = SamplingRules(model, limits)
        self._steering = SteeringRules(model, limits, stored)
        self._is_job = is_job
        self._capture_bytes_max = (
            limits.capture_bytes_request if is_job else limits.capture_bytes_completion
        )
        self.fields = frozenset((*OTHER_FIELDS, *self._sampling.rules))

    @property
    def vectors(self) -> dict[str, Vector]:
        """The numbers that valid requests brought along, by name."""
        return self._steering.vectors

    def check(self, bodies: Sequence[Mapping[str, Any]]) -> list[RequestSpec | list[Problem]]:
        """Check bodies together; each gives a RequestSpec, or the list of what is wrong with it."""
        drafts = [self._draft(body) for body in bodies]
        self._count_tokens(drafts)
        return [self._finish(draft) for draft in drafts]

    def _draft(self, body: Mapping[str, Any]) -> Draft:
        problems: list[Problem] = []
        if not body.keys() <= self.fields:
            problems += unknown_fields(body, self.fields, of="A completions body")
        sampling = self._sampling.read(body, problems)
        prompts = read_prompts(body, self._model, self._limits, problems)
        add_special = _flag(body, "add_special_tokens", problems, default=True)
        self._check_others(body, problems)
        captures = read_captures(body, self._model, problems)
        steering = self._check_steering(body, sampling, prompts, problems)
        prompt = prompts[0] if len(prompts) == 1 else None
        return Draft(problems, prompt, add_special, sampling, captures, steering)

    def _check_others(self, body: Mapping[str, Any], problems: list[Problem]) -> None:
        if self._is_job and not STREAM_FIELDS.isdisjoint(body):
            problems += [
                Problem(name, f"{name} belongs to a single Completion; a Job does not stream.")
                for name in ("stream", "stream_options")
                if body.get(name) is not None and body[name] is not False
            ]
        if self._is_job and body.get("echo") is True:
            message = (
                "A Job does not echo: every result row holds the prompt beside the text. "
                "For log-probabilities of the prompt ask for prompt_logprobs."
            )
            problems.append(Problem("echo", message))
        _flag(body, "return_token_ids", problems, default=False)
        user = body.get("user")
        if user is not None and (not isinstance(user, str) or len(user) > USER_CHARS_MAX):
            message = f"user must be a string of at most {USER_CHARS_MAX} characters."
            problems.append(Problem("user", message))
        if body.get("interventions") is not None:
            message = (
                "This server does not offer interventions. Steer with apply_steering_vectors, "
                "which adds vectors to the residual stream."
            )
            problems.append(Problem("interventions", message))

    def _check_steering(
        self,
        body: Mapping[str, Any],
        sampling: dict[str, Any],
        prompts: tuple[Prompt, ...],
        problems: list[Problem],
    ) -> Steering | None:
        """Check the rules about n and prompts, then those of apply_steering_vectors.

        Of all steering rules only the first broken one is named.
        """
        sent = body.get(STEERING)
        alone = _refuse_several(body, sampling, prompts, is_job=self._is_job)
        if sent is None:
            problems += alone
            return None
        if sent != [] and alone:
            problems += alone
            return None
        try:
            return self._steering.read(sent)
        except RefusedError as refusal:
            problems.append(Problem(STEERING, str(refusal)))
            return None

    def _count_tokens(self, drafts: Iterable[Draft]) -> None:
        """Turn all texts into token ids, in at most two batches."""
        for add_special in (True, False):
            waiting = [
                (draft, draft.prompt.text)
                for draft in drafts
                if draft.prompt is not None
                and draft.prompt.text is not None
                and draft.add_special_tokens is add_special
            ]
            if not waiting:
                continue
            texts = [text for _, text in waiting]
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=add_special)
            for (draft, _), ids in zip(waiting, encoded, strict=True):
                draft.token_ids = tuple(ids)

    def _finish(self, draft: Draft) -> RequestSpec | list[Problem]:
        prompt, problems = draft.prompt, draft.problems
        if prompt is None:
            return problems
        ids = draft.token_ids if prompt.token_ids is None else prompt.token_ids
        max_tokens = self._max_tokens(draft.sampling, ids, problems)
        if max_tokens is None:
            return problems
        min_tokens = draft.sampling.get("min_tokens", 0)
        if min_tokens > max_tokens:
            message = f"min_tokens is {min_tokens}, but max_tokens is {max_tokens}."
            problems.append(Problem("min_tokens", message))
        self._check_capture_bytes(draft, len(ids) + max_tokens - 1)
        if draft.steering is not None:
            try:
                self._steering.check_reach(
                    draft.steering, prompt_tokens=len(ids), max_tokens=max_tokens
                )
            except RefusedError as refusal:
                problems.append(Problem(STEERING, str(refusal)))
        if problems:
            return problems
        bos = self._model.bos_id
        doubled = bos is not None and ids[:2] == (bos, bos)
        return RequestSpec(
            prompt_token_ids=ids,
            prompt=prompt.text,
            sampling=Sampling(**{**draft.sampling, "max_tokens": max_tokens}),
            interventions=draft.steering.interventions if draft.steering is not None else (),
            captures=draft.captures,
            warnings=(DOUBLE_BOS,) if doubled else (),
        )

    def _max_tokens(
        self, sampling: dict[str, Any], ids: tuple[int, ...], problems: list[Problem]
    ) -> int | None:
        """Give max_tokens, shrunk to the context when it was not sent."""
        context = self._model.max_model_len
        room = context - len(ids)
        if not ids:
            message = (
                "The prompt has no tokens. Send at least one character, or the token id to start "
                "from."
            )
            problems.append(Problem("prompt", message))
            return None
        asked: int | None = sampling.get("max_tokens")
        if room < 1 or (asked is not None and asked > room):
            wants = "" if asked is None else f" and max_tokens is {asked}"
            message = (
                f"The prompt has {len(ids)} tokens{wants}, but the context of "
                f"{self._model.name} is {context} tokens. Shorten the prompt"
                + ("." if asked is None else " or lower max_tokens.")
            )
            param = "prompt" if room < 1 else "max_tokens"
            problems.append(Problem(param, message, "context_length_exceeded"))
            return None
        return asked if asked is not None else min(MAX_TOKENS_DEFAULT, room)

    def _check_capture_bytes(self, draft: Draft, rows: int) -> None:
        if not draft.captures:
            return
        size = capture_bytes(draft.captures, self._model, rows=rows)
        if size > self._capture_bytes_max:
            name = draft.captures[0].name
            param = "output_residual_stream" if name == "residual_stream" else "captures"
            message = (
                f"The captures need up to {size} bytes ({rows} rows a layer); at most "
                f"{self._capture_bytes_max} are allowed. Read fewer layers, or lower max_tokens."
            )
            draft.problems.append(Problem(param, message))


def _refuse_several(
    body: Mapping[str, Any],
    sampling: dict[str, Any],
    prompts: tuple[Prompt, ...],
    *,
    is_job: bool,
) -> list[Problem]:
    """Refuse n and several prompts beside reads and writes, and several prompts in a Job."""
    present = next((name for name in READS_AND_WRITES if body.get(name) not in (None, False)), None)
    problems: list[Problem] = []
    if present is not None and sampling.get("n", 1) != 1:
        message = f"n is {sampling['n']}; a request with {present} makes one choice. Send n: 1."
        problems.append(Problem(present, message))
    if len(prompts) > 1 and (is_job or present is not None):
        what = f"A request with {present}" if present is not None else "A request of a Job"
        message = f"{what} takes one prompt, but {len(prompts)} were sent. Send a request for each."
        problems.append(Problem(present or "prompt", message))
    return problems


def _flag(body: Mapping[str, Any], name: str, problems: list[Problem], *, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        problems.append(Problem(name, f"{name} must be true or false, not {shown(value)}."))
        return default
    return value
