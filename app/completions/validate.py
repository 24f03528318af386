"""The one validator of a completions body: raw JSON in, a RequestSpec or all its problems out.

POST /v1/completions and Jobs use the same rules. Requests go through in batches, because counting
tokens is quick only for many texts at once. Nothing is stored here; the numbers that requests
brought along are in `vectors` afterwards, by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from app.catalog import ServedModel, Tokenizer, TooMany
from app.completions.at import Reach
from app.completions.captures import PARAM as CAPTURES
from app.completions.captures import RESIDUAL_STREAM, CaptureRules, capture_bytes
from app.completions.captures import STREAM_PARAM as STREAM
from app.completions.interventions import PARAM as INTERVENTIONS
from app.completions.interventions import InterventionRules
from app.completions.plans import CapturePlan, OpPlan, Prompted
from app.completions.problems import Problem, RefusedError, is_int, shown, unknown_fields
from app.completions.prompts import Prompt, read_prompts
from app.completions.rows_of import RowsOf
from app.completions.sampling import SamplingRules
from app.completions.sent_vectors import VectorReader
from app.completions.spec import RequestSpec, Sampling
from app.completions.steering import PARAM as STEERING
from app.completions.steering import Steering, SteeringRules
from app.errors import InvalidRequestError
from app.settings import Limits
from app.steering.spec import Capture, Intervention
from app.steering.vectors import Vector

MAX_TOKENS_DEFAULT = 16
DOUBLE_BOS = "double_bos"
# Rules about n and several prompts name the first of these that is present.
READS_AND_WRITES = (STREAM, CAPTURES, STEERING, INTERVENTIONS)
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
    stream: Capture | None
    captures: CapturePlan | None
    steering: Steering | None
    interventions: OpPlan | None
    token_ids: tuple[int, ...] | TooMany = ()


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
        captured: Mapping[RowsOf, Vector | str] = MappingProxyType({}),
    ) -> None:
        """Bind everything that rules look at.

        `stored` holds the stored vectors that requests name, `captured` the rows that replaces
        take from other Jobs, or why they cannot be had.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits
        self._sampling = SamplingRules(model, limits)
        self._reader = VectorReader(stored)
        self._steering = SteeringRules(model, limits, self._reader)
        self._interventions = InterventionRules(model, limits, self._reader, captured)
        self._captures = CaptureRules(model, limits, self._reader)
        self._special_ids = frozenset(model.special_token_ids)
        self._is_job = is_job
        self._capture_bytes_max = (
            limits.capture_bytes_request if is_job else limits.capture_bytes_completion
        )
        self.fields = frozenset((*OTHER_FIELDS, *self._sampling.rules))

    @property
    def vectors(self) -> dict[str, Vector]:
        """The numbers that valid requests brought along, by name."""
        return self._reader.vectors

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
        stream = self._captures.read_stream(body, problems)
        captures: CapturePlan | None = None
        try:
            captures = self._captures.read(body, problems)
        except InvalidRequestError as refusal:
            problems.append(_problem(CAPTURES, refusal))
        steering, interventions = self._check_writes(body, prompts, problems)
        prompt = prompts[0] if len(prompts) == 1 else None
        return Draft(
            problems, prompt, add_special, sampling, stream, captures, steering, interventions
        )

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

    def _check_writes(
        self,
        body: Mapping[str, Any],
        prompts: tuple[Prompt, ...],
        problems: list[Problem],
    ) -> tuple[Steering | None, OpPlan | None]:
        """Check the rules about n and prompts, then those of Steering vectors and interventions.

        Of the rules of each field only the first broken one is named; that a list is not empty
        is the very first of them.
        """
        vectors, ops = body.get(STEERING), body.get(INTERVENTIONS)
        present = next((name for name in READS_AND_WRITES if _is_sent(body.get(name))), None)
        if present is not None:
            # The rule about n beside a read or a write says all that is wrong with n.
            problems[:] = [problem for problem in problems if problem.param != "n"]
        alone = _refuse_several(body, prompts, present, is_job=self._is_job)
        # Only of the list that is read first can it be said that it is empty.
        if alone and (ops if vectors is None else vectors) != []:
            problems += alone
            return None, None
        steering: Steering | None = None
        interventions: OpPlan | None = None
        if vectors is not None:
            try:
                steering = self._steering.read(vectors)
            except (RefusedError, InvalidRequestError) as refusal:
                problems.append(_problem(STEERING, refusal))
        if ops is not None:
            numbers = 0 if steering is None else steering.numbers
            try:
                interventions = self._interventions.read(ops, numbers_beside=numbers)
            except (RefusedError, InvalidRequestError) as refusal:
                problems.append(_problem(INTERVENTIONS, refusal))
        return steering, interventions

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
            encoded = self._tokenizer.encode_within(
                texts, self._model.max_model_len, add_special_tokens=add_special
            )
            for (draft, _), ids in zip(waiting, encoded, strict=True):
                draft.token_ids = ids if isinstance(ids, TooMany) else tuple(ids)

    def _finish(self, draft: Draft) -> RequestSpec | list[Problem]:
        prompt, problems = draft.prompt, draft.problems
        if prompt is None:
            return problems
        ids = draft.token_ids if prompt.token_ids is None else prompt.token_ids
        if isinstance(ids, TooMany):
            how_many = f"{'' if ids.is_exact else 'at least '}{ids.tokens}"
            problems.append(self._no_room(how_many, draft.sampling.get("max_tokens")))
            return problems
        max_tokens = self._max_tokens(draft.sampling, ids, problems)
        if max_tokens is None:
            return problems
        min_tokens = draft.sampling.get("min_tokens", 0)
        if min_tokens > max_tokens:
            message = f"min_tokens is {min_tokens}, but max_tokens is {max_tokens}."
            problems.append(Problem("min_tokens", message))
        captures, interventions = self._place(draft, ids, max_tokens)
        if problems:
            return problems
        bos = self._model.bos_id
        doubled = bos is not None and ids[:2] == (bos, bos)
        return RequestSpec(
            prompt_token_ids=ids,
            prompt=prompt.text,
            sampling=Sampling(**{**draft.sampling, "max_tokens": max_tokens}),
            interventions=interventions,
            captures=captures,
            warnings=(DOUBLE_BOS,) if doubled else (),
        )

    def _place(
        self, draft: Draft, ids: tuple[int, ...], max_tokens: int
    ) -> tuple[tuple[Capture, ...], tuple[Intervention, ...]]:
        """Resolve what reads and writes to the positions of the prompt; add what is wrong."""
        problems = draft.problems
        captures: tuple[Capture, ...] = () if draft.stream is None else (draft.stream,)
        interventions: tuple[Intervention, ...] = ()
        reach = Reach(len(ids), max_tokens, self._model.max_model_len)
        prompted = Prompted(ids, self._special_ids, reach)
        if draft.captures is not None:
            try:
                captures += draft.captures.place(prompted)
            except RefusedError as refusal:
                problems.append(Problem(CAPTURES, str(refusal)))
        if captures:
            self._check_capture_bytes(captures, len(ids) + max_tokens - 1, problems)
        if draft.steering is not None:
            interventions = draft.steering.interventions
            try:
                self._steering.check_reach(
                    draft.steering, prompt_tokens=len(ids), max_tokens=max_tokens
                )
            except RefusedError as refusal:
                problems.append(Problem(STEERING, str(refusal)))
        if draft.interventions is not None:
            try:
                interventions += draft.interventions.place(prompted)
            except RefusedError as refusal:
                problems.append(Problem(INTERVENTIONS, str(refusal)))
        return captures, interventions

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
            param = "prompt" if room < 1 else "max_tokens"
            problems.append(self._no_room(str(len(ids)), asked, param))
            return None
        return asked if asked is not None else min(MAX_TOKENS_DEFAULT, room)

    def _no_room(self, prompt_tokens: str, asked: int | None, param: str = "prompt") -> Problem:
        """Say that prompt and max_tokens do not fit into the context."""
        wants = "" if asked is None else f" and max_tokens is {asked}"
        message = (
            f"The prompt has {prompt_tokens} tokens{wants}, but the context of "
            f"{self._model.name} is {self._model.max_model_len} tokens. Shorten the prompt"
            + ("." if asked is None else " or lower max_tokens.")
        )
        return Problem(param, message, "context_length_exceeded")

    def _check_capture_bytes(
        self, captures: tuple[Capture, ...], rows: int, problems: list[Problem]
    ) -> None:
        size = capture_bytes(captures, self._model, rows=rows)
        if size <= self._capture_bytes_max:
            return
        param = STREAM if captures[0].name == RESIDUAL_STREAM else CAPTURES
        message = (
            f"The captures need up to {size} bytes (the request runs {rows} positions); at most "
            f"{self._capture_bytes_max} are allowed. Read fewer layers or positions, reduce them, "
            "or lower max_tokens."
        )
        problems.append(Problem(param, message))


def _problem(param: str, refusal: RefusedError | InvalidRequestError) -> Problem:
    """Tell a broken rule; an InvalidRequestError says that what is named is too much to read."""
    if isinstance(refusal, InvalidRequestError):
        return Problem(param, refusal.message, refusal.code)
    return Problem(param, str(refusal))


def _is_sent(value: Any) -> bool:
    return value is not None and value is not False


def _refuse_several(
    body: Mapping[str, Any],
    prompts: tuple[Prompt, ...],
    present: str | None,
    *,
    is_job: bool,
) -> list[Problem]:
    """Refuse n and several prompts beside reads and writes, and several prompts in a Job.

    `present` is the first read or write that was sent.
    """
    problems: list[Problem] = []
    n = body.get("n")
    if present is not None and n is not None and not (is_int(n) and n == 1):
        message = f"n is {shown(n)}; a request with {present} makes one choice. Send n: 1."
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
