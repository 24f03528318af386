"""A request after validation: token ids, sampling, interventions, captures; all frozen.

This is what Postgres stores for each request of a Job and what a worker runs. Every default is
filled in, every reference resolved, so a worker decides nothing about meaning.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from app.steering.spec import (
    Capture,
    Intervention,
    capture_from_json,
    intervention_from_json,
    to_json,
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; names and meaning as in the completions API.

    `max_tokens` is always a number here. Choice i of `n` draws with seed + i. `logprobs` and
    `prompt_logprobs` are how many alternatives to return a token, None for no logprobs.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One completion, ready to run. `prompt` is the text when the prompt was sent as text."""

    prompt_token_ids: tuple[int, ...]
    prompt: str | None
    sampling: Sampling
    interventions: tuple[Intervention, ...] = ()
    captures: tuple[Capture, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """P: how many tokens the prompt has."""
        return len(self.prompt_token_ids)

    @property
    def tokens_held(self) -> int:
        """P + n x M: the most that this request can cost, and the amount of its Hold."""
        return self.prompt_tokens + self.sampling.n * self.sampling.max_tokens

    @property
    def capture_rows_max(self) -> int:
        """P + M - 1: rows a capture can have (the last sampled token never runs)."""
        return self.prompt_tokens + self.sampling.max_tokens - 1


_SAMPLING_DEFAULTS = asdict(Sampling())


def spec_to_json(spec: RequestSpec) -> dict[str, Any]:
    """Write a request spec for the `requests.spec` column; defaults are left out."""
    # Not asdict: it copies every value and took half the time of an intake.
    sampling = {
        key: value
        for key, default in _SAMPLING_DEFAULTS.items()
        if (value := getattr(spec.sampling, key)) != default
    }
    data: dict[str, Any] = {"prompt_token_ids": spec.prompt_token_ids, "sampling": sampling}
    if spec.prompt is not None:
        data["prompt"] = spec.prompt
    if spec.interventions:
        data["interventions"] = [to_json(item) for item in spec.interventions]
    if spec.captures:
        data["captures"] = [to_json(item) for item in spec.captures]
    if spec.warnings:
        data["warnings"] = spec.warnings
    return data


def spec_from_json(data: dict[str, Any]) -> RequestSpec:
    """Read a request spec as `spec_to_json` wrote it."""
    return RequestSpec(
        prompt_token_ids=tuple(data["prompt_token_ids"]),
        prompt=data.get("prompt"),
        sampling=_sampling_from_json(data["sampling"]),
        interventions=tuple(map(intervention_from_json, data.get("interventions", ()))),
        captures=tuple(map(capture_from_json, data.get("captures", ()))),
        warnings=tuple(data.get("warnings", ())),
    )


def _sampling_from_json(data: dict[str, Any]) -> Sampling:
    known = {field.name for field in fields(Sampling)}
    values = {key: _frozen(value) for key, value in data.items() if key in known}
    return Sampling(**values)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
