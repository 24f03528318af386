"""A request after validation: token ids, sampling, interventions, captures; all frozen.

This is what Postgres stores for each request of a Job and what a worker runs. Every default is
filled in, every reference resolved, so a worker decides nothing about meaning. It runs a request
as it is stored or not at all: readers refuse fields that they do not know.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import groupby, takewhile
from typing import Any

from app.steering.spec import (
    Capture,
    Intervention,
    capture_from_json,
    field_names,
    intervention_from_json,
    refuse_unknown,
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
        data["interventions"] = _interventions_to_json(spec.interventions)
    if spec.captures:
        data["captures"] = _captures_to_json(spec.captures)
    if spec.warnings:
        data["warnings"] = spec.warnings
    return data


@lru_cache(maxsize=256)
def _interventions_to_json(items: tuple[Intervention, ...]) -> tuple[dict[str, Any], ...]:
    """Write interventions once for the many requests of a Job that share them.

    Those that differ in nothing but the layer, with rows in even steps, are written as one with
    `layers` and `row_step`: an op on every layer would take kilobytes in each request otherwise.
    The outcome is shared and must not be changed.
    """
    written: list[dict[str, Any]] = []
    for _, group in groupby(items, key=lambda item: replace(item, layer=0, row=0)):
        rest = list(group)
        while rest:
            step = rest[1].row - rest[0].row if len(rest) > 1 else 0
            run = list(takewhile(lambda pair: pair[1].row == pair[0], _rows(rest, step)))
            data = to_json(rest[0])
            if len(run) > 1:
                del data["layer"]
                data |= {"layers": [item.layer for _, item in run], "row_step": step}
            written.append(data)
            rest = rest[len(run) :]
    return tuple(written)


@lru_cache(maxsize=256)
def _captures_to_json(items: tuple[Capture, ...]) -> tuple[dict[str, Any], ...]:
    """Write captures, once for all requests that share them; not to be changed."""
    return tuple(map(to_json, items))


def _rows(items: list[Intervention], step: int) -> Iterator[tuple[int, Intervention]]:
    """Pair each intervention with the row that it has if rows go up in even steps."""
    return ((items[0].row + place * step, item) for place, item in enumerate(items))


def _interventions_from_json(written: Iterable[dict[str, Any]]) -> Iterator[Intervention]:
    for data in written:
        if "layers" not in data:
            yield intervention_from_json(data)
            continue
        rest = {key: value for key, value in data.items() if key not in _RUN}
        first = intervention_from_json({**rest, "layer": 0})
        for place, layer in enumerate(data["layers"]):
            yield replace(first, layer=layer, row=first.row + place * data["row_step"])


_RUN = frozenset({"layers", "row_step"})  # in place of the layer, where one is written for many
_SPEC = field_names(RequestSpec)
_SAMPLING = field_names(Sampling)


def spec_from_json(data: dict[str, Any]) -> RequestSpec:
    """Read a request spec as `spec_to_json` wrote it.

    Raises NewerSpecError when newer code wrote it, with a field that this code does not know.
    """
    refuse_unknown(data, _SPEC, "a request")
    return RequestSpec(
        prompt_token_ids=tuple(data["prompt_token_ids"]),
        prompt=data.get("prompt"),
        sampling=_sampling_from_json(data["sampling"]),
        interventions=tuple(_interventions_from_json(data.get("interventions", ()))),
        captures=tuple(map(capture_from_json, data.get("captures", ()))),
        warnings=tuple(data.get("warnings", ())),
    )


def _sampling_from_json(data: dict[str, Any]) -> Sampling:
    refuse_unknown(data, _SAMPLING, "the sampling of a request")
    return Sampling(**{key: _frozen(value) for key, value in data.items()})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
