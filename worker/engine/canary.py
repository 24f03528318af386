"""Before a worker takes work it proves, on its own engine, that steering and reading are real.

    Layer L moves by s * v        Layer L-1 does not        a neighbour in the batch does not
    Layer L+1 moves, too          scale 0 changes nothing, bit for bit
    at every other site that is served: what is read after the ops is what is read before, moved

Run in the mode that serves, at start and again while serving. Rows are compared to within the
rounding of the model's dtype, because a batch's shape decides how a matrix product rounds.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Intervention, Op, Site
from worker.outcomes import Succeeded

if TYPE_CHECKING:
    import numpy.typing as npt

    from worker.engine.protocol import Engine
    from worker.engine.vectors import VectorCache

    Floats = npt.NDArray[np.float32]

_PROMPT = (3, 5, 8, 13, 21, 34)
_NEIGHBOUR = (4, 6, 9, 14, 22, 35, 56)
_TOKENS = 3
# One token is allowed, so that steered and unsteered rows stand for the same text.
_FORCED = 7
# In units of a row's largest magnitude; the steer itself moves every row by at least 1. Two runs
# whose batches have different shapes round differently in every layer, a dtype's epsilon each.
_ROUNDING = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
# A busy engine mixes batches: equal bits are expected of some attempt, not of each.
_ATTEMPTS = 5
_numbers = itertools.count()


class CanaryError(Exception):
    """The engine does not steer as it must; the worker takes no work."""


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """What was seen: how far Layer L was from the expected move, and how far others moved.

    All are largest absolute differences in units of the row's largest magnitude.
    """

    layer: int
    move_error: float
    below_moved: float
    above_moved: float
    neighbour_moved: float


async def prove_steering(engine: Engine, vectors: VectorCache) -> CanaryReport:
    """Run the proof; raise CanaryError, saying what was seen, when it fails."""
    facts = engine.facts
    layer = facts.n_layers // 2
    vector = _alternating(facts.hidden_size)
    name = f"canary_{facts.hidden_size}"
    vectors.put(name, vector)
    layers = tuple(range(max(layer - 1, 0), min(layer + 2, facts.n_layers)))
    plain = _request(_PROMPT, layers)
    neighbour = _request(_NEIGHBOUR, layers)
    baseline, calm = await _pair(engine, plain, neighbour)
    scale = float(np.abs(baseline[layer]).max()) or 1.0
    op = Intervention(op=Op.add, site=Site.resid_post, layer=layer, vector=name, row=0, scale=scale)
    steered, beside = await _pair(engine, replace(plain, interventions=(op,)), neighbour)
    rounding = _ROUNDING[facts.dtype]
    report = CanaryReport(
        layer=layer,
        move_error=_distance(steered[layer], baseline[layer] + scale * vector),
        below_moved=_distance(steered[layers[0]], baseline[layers[0]]) if layer else 0.0,
        above_moved=_distance(steered[layers[-1]], baseline[layers[-1]]),
        neighbour_moved=max(_distance(beside[each], calm[each]) for each in layers),
    )
    if report.move_error > rounding:
        raise CanaryError(f"Layer {layer} did not move by scale times vector: {report}")
    if report.below_moved > rounding:
        raise CanaryError(f"Layer {layers[0]} moved, but only Layer {layer} was steered: {report}")
    if report.above_moved <= rounding:
        raise CanaryError(f"what follows Layer {layer} did not feel the steer: {report}")
    if report.neighbour_moved > rounding:
        raise CanaryError(f"an unsteered neighbour in the batch moved: {report}")
    await _prove_zero(engine, plain, op)
    for site, width in facts.site_widths.items():
        if site is not Site.resid_post:
            vector = _alternating(width)
            vectors.put(f"canary_{width}", vector)
            await _prove_site(engine, replace(op, site=site, vector=f"canary_{width}"), vector)
    return report


async def _prove_site(engine: Engine, op: Intervention, vector: Floats) -> None:
    reads = (
        Capture(name="before", site=op.site, layers=(op.layer,), before=True),
        Capture(name="after", site=op.site, layers=(op.layer,)),
        Capture(name="felt", site=Site.resid_post, layers=(op.layer,)),
    )
    plain = replace(_request(_PROMPT, ()), captures=reads)
    untouched = await _reads(engine, plain)
    steered = await _reads(engine, replace(plain, interventions=(op,)))
    rounding, where = _ROUNDING[engine.facts.dtype], f"Layer {op.layer} at {op.site.value}"
    (before,), (after,) = steered["before"].values(), steered["after"].values()
    error = _distance(after, before + op.scale * vector)
    if error > rounding:
        raise CanaryError(f"{where} did not move by scale times vector, but by {error} else")
    (felt,), (calm,) = steered["felt"].values(), untouched["felt"].values()
    if _distance(felt, calm) <= rounding:
        raise CanaryError(f"what follows {where} did not feel the steer")


async def _prove_zero(engine: Engine, plain: RequestSpec, op: Intervention) -> None:
    zero = replace(plain, interventions=(replace(op, scale=0.0),))
    for _ in range(_ATTEMPTS):
        without = await _run(engine, plain)
        with_zero = await _run(engine, zero)
        if all(np.array_equal(without[layer], with_zero[layer]) for layer in without):
            return
    raise CanaryError("an intervention of scale 0 changed the activations")


def _alternating(width: int) -> Floats:
    """Ones of alternating signs: a constant vector would vanish in a mean-removing norm."""
    return np.where(np.arange(width) % 2 == 0, 1.0, -1.0).astype(np.float32)


def _request(prompt: tuple[int, ...], layers: tuple[int, ...]) -> RequestSpec:
    return RequestSpec(
        prompt_token_ids=prompt,
        prompt=None,
        sampling=Sampling(
            max_tokens=_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            allowed_token_ids=(_FORCED,),
        ),
        captures=(Capture(name="canary", site=Site.resid_post, layers=layers),),
    )


async def _pair(
    engine: Engine, first: RequestSpec, second: RequestSpec
) -> tuple[dict[int, Floats], dict[int, Floats]]:
    one, two = await asyncio.gather(_run(engine, first), _run(engine, second))
    return one, two


async def _run(engine: Engine, spec: RequestSpec) -> dict[int, Floats]:
    """Run one request; return its rows [P + G - 1, width] as float32 by layer."""
    return (await _reads(engine, spec))["canary"]


async def _reads(engine: Engine, spec: RequestSpec) -> dict[str, dict[int, Floats]]:
    """Run one request; return the rows of each capture by its name and layer."""
    key = f"canary-{next(_numbers)}"
    outcome = await engine.run(key, spec, salt=key)
    if not isinstance(outcome, Succeeded):
        raise CanaryError(f"a canary request did not succeed: {outcome}")
    reads = {
        capture.name: {layer: _floats(stored) for layer, stored in capture.layers.items()}
        for capture in outcome.captures
    }
    outcome.release()
    expected = spec.prompt_tokens + _TOKENS - 1
    if any(len(stored) != expected for rows in reads.values() for stored in rows.values()):
        raise CanaryError(f"expected {expected} captured rows of every layer")
    return reads


def _floats(stored: npt.NDArray[np.uint16] | npt.NDArray[np.float32]) -> Floats:
    if stored.dtype == np.float32:
        return np.array(stored, dtype=np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def _distance(rows: Floats, expected: Floats) -> float:
    """Largest absolute difference of a row, in units of the row's largest magnitude."""
    size = np.maximum(np.abs(rows).max(axis=1), np.abs(expected).max(axis=1))
    return float((np.abs(rows - expected).max(axis=1) / np.maximum(size, 1e-30)).max())
