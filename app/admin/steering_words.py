"""Says in words what a request does to the residual stream, and what it reads.

Interventions that differ in nothing but the layer become one sentence. Vectors are named by
content, shortened; numbers never appear.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import FOREVER, Capture, Intervention, Op, Reduce, Site

SPANS_SHOWN: Final = 4
TIMES: Final = "\u00d7"
TO: Final = "\u2013"  # between two numbers
MINUS: Final = "\u2212"


def steering_in_words(spec: RequestSpec) -> list[str]:
    """Describe every intervention of a request; an empty list for a plain request."""
    sentences: list[str] = []
    groups = groupby(spec.interventions, key=lambda item: replace(item, layer=0, row=0))
    for _, group in groups:
        items = list(group)
        sentences.append(_sentence(items[0], [item.layer for item in items], spec.prompt_tokens))
    return sentences


def captures_in_words(spec: RequestSpec) -> list[str]:
    """Describe every capture of a request."""
    return [_capture(item) for item in spec.captures]


def sampling_in_words(sampling: Sampling) -> str:
    """Describe how tokens are drawn, leaving out what is as usual."""
    said = [f"at most {sampling.max_tokens} tokens", f"temperature {sampling.temperature:g}"]
    if sampling.seed is not None:
        said.append(f"seed {sampling.seed}")
    if sampling.n > 1:
        said.append(f"{sampling.n} choices")
    usual = Sampling()
    for name in ("top_p", "top_k", "min_p", "min_tokens", "repetition_penalty"):
        value = getattr(sampling, name)
        if value != getattr(usual, name):
            said.append(f"{name} {value:g}")
    if sampling.stop:
        said.append(f"{len(sampling.stop)} stop strings")
    return ", ".join(said)


def short_vector(name: str) -> str:
    """Shorten the content address of a vector: sv_ and the first eight digits."""
    return name if len(name) <= 14 else f"{name[:11]}…"


def _sentence(item: Intervention, layers: Sequence[int], prompt_tokens: int) -> str:
    vector = short_vector(item.vector)
    if item.op is Op.add:
        strength = f"{_number(item.scale)} {TIMES} "
        strength += f"the norm along {vector}" if item.norm_match else vector
        what = f"Steering vector: adds {strength}" if item.summed else f"Adds {strength}"
    elif item.op is Op.orthogonal:
        what = (
            f"Removes the direction {vector}"
            if not item.coeff
            else f"Scales the direction {vector} by {_number(item.coeff)}"
        )
    elif item.op is Op.cap:
        what = f"Keeps the projection on {vector} {_bounds(item.low, item.high)}"
    else:
        what = f"Replaces by {vector}"
    where = f"at {_layers(layers)}"
    if item.site is not Site.resid_post:
        where += f", {item.site.value}"
    if item.heads is not None:
        where += f", heads {_ranges(item.heads)}"
    at = _positions(item, prompt_tokens)
    nothing = " (changes nothing)" if item.changes_nothing else ""
    return f"{what} {where}, {at}{nothing}."


def _bounds(low: float | None, high: float | None) -> str:
    if low is None:
        return f"at {_number(high)} or below"
    if high is None:
        return f"at {_number(low)} or above"
    return f"between {_number(low)} and {_number(high)}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}".replace("-", MINUS, int(value < 0))


def _positions(item: Intervention, prompt_tokens: int) -> str:
    if item.positions is not None:
        return f"positions {_ranges(item.positions)}" if item.positions else "no position"
    if item.spans is None:
        return "all positions"
    if item.spans == ():
        return "no position"
    if item.spans == ((0, prompt_tokens),):
        return "the prompt"
    if item.spans == ((prompt_tokens, FOREVER),):
        return "generated tokens"
    if item.spans == ((prompt_tokens - 1, FOREVER),):
        return "the position predicted from"
    shown = [_span(start, end) for start, end in item.spans[:SPANS_SHOWN]]
    more = ["…"] if len(item.spans) > SPANS_SHOWN else []
    return "positions " + ", ".join(shown + more)


def _span(start: int, end: int) -> str:
    if end == FOREVER:
        return f"{start} onwards"
    return str(start) if end == start + 1 else f"{start}{TO}{end - 1}"


def _capture(item: Capture) -> str:
    kept = {
        Reduce.none: "",
        Reduce.mean: ", mean of the rows",
        Reduce.norm: ", norm of each row",
        Reduce.project: f", projected on {len(item.directions)} directions",
    }[item.reduce]
    when = " before the interventions" if item.before else ""
    where = "" if item.spans is None else ", some positions"
    return f"{item.name}: {item.site.value} at {_layers(item.layers)}{when}{kept}{where}."


def _layers(layers: Iterable[int]) -> str:
    numbers = sorted(set(layers))
    return f"Layer {numbers[0]}" if len(numbers) == 1 else f"Layers {_ranges(numbers)}"


def _ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers with neighbours joined, runs as first and last."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(a) if a == b else f"{a}{TO}{b}" for a, b in runs[:SPANS_SHOWN]]
    return ", ".join(shown + (["…"] if len(runs) > SPANS_SHOWN else []))
