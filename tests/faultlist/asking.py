"""Requests to the tiny model whose rows tell by themselves where they were steered.

Tokens are forced, so that steered and plain requests run the same text; an op at the last layer
moves the rows that it meets and no other, since nothing follows it. `moved` is then a trace of
the positions at which an op acted.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Intervention, Op, Site
from tests.engine.engines import run_together
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Outcome, Succeeded

Floats = npt.NDArray[np.float32]

N_LAYERS, WIDTH, VOCAB = 4, 64, 256
LAST = N_LAYERS - 1
EVERY_ROW = (Capture("rows", Site.resid_post, tuple(range(N_LAYERS))),)
FORCED = 7
# Of float32 rows of size 1 to 10, computed in batches of other shapes.
SAME = 2e-4
_names = itertools.count()


def prompt_of(length: int, *, seed: int = 0) -> tuple[int, ...]:
    """Draw a prompt of `length` tokens."""
    numbers = np.random.default_rng([seed, length])
    return tuple(int(token) for token in numbers.integers(3, VOCAB, size=length))


def request(
    prompt: tuple[int, ...],
    *interventions: Intervention,
    captures: tuple[Capture, ...] = EVERY_ROW,
    forced: bool = True,
    **sampling: Any,
) -> RequestSpec:
    """Make a greedy request, of one possible token unless not `forced`."""
    drawn = Sampling(
        max_tokens=4,
        temperature=0.0,
        ignore_eos=True,
        allowed_token_ids=(FORCED,) if forced else None,
    )
    return RequestSpec(
        prompt_token_ids=prompt,
        prompt=None,
        sampling=replace(drawn, **sampling),
        interventions=interventions,
        captures=captures,
    )


def vector(engine: VllmEngine, *, seed: int = 0, size: float = 3.0, rows: int = 1) -> str:
    """Store a vector of numbers around `size` and return its name."""
    numbers = np.random.default_rng(seed).normal(size=(rows, WIDTH)) * size
    name = f"sv_drawn_{next(_names)}"
    engine.vectors.put(name, numbers.astype(np.float32))
    return name


def numbers_of(engine: VllmEngine, name: str) -> Floats:
    """Read a stored vector back, [rows, width]."""
    raw = np.lib.format.open_memmap(engine.vectors.path(name), mode="r")
    return np.array(raw, dtype=np.float32)


def add(name: str, *, layer: int = LAST, **changes: Any) -> Intervention:
    """Add a stored vector at `resid_post` of one layer, at every position unless told otherwise."""
    return replace(Intervention(Op.add, Site.resid_post, layer, name, 0), **changes)


def succeeded(outcome: Outcome) -> Succeeded:
    """Return an outcome that must be a success."""
    assert isinstance(outcome, Succeeded), outcome
    return outcome


def tokens_of(outcome: Outcome) -> tuple[int, ...]:
    """Return the tokens of the first choice."""
    return succeeded(outcome).choices[0].token_ids


def rows_of(outcome: Outcome, layer: int = LAST, *, capture: int = 0) -> Floats:
    """Return the rows of one layer of a capture, [positions, width]."""
    return np.array(succeeded(outcome).captures[capture].layers[layer], dtype=np.float32)


def moved(engine: VllmEngine, spec: RequestSpec, *, layer: int = LAST) -> set[int]:
    """Say which rows of a layer differ from those of the same request without interventions."""
    plain, steered = run_together(engine, [replace(spec, interventions=()), spec])
    return moved_between(plain, steered, layer)


def moved_between(plain: Outcome, steered: Outcome, layer: int = LAST) -> set[int]:
    """Say which rows of a layer differ between two outcomes of the same text."""
    assert tokens_of(plain) == tokens_of(steered)
    change = np.abs(rows_of(steered, layer) - rows_of(plain, layer)).max(axis=1)
    # Neither a touch nor a trace: a row moved by a whole vector, or it did not move.
    assert not np.any((change > SAME) & (change < 0.1)), change
    return set(np.flatnonzero(change > SAME).tolist())
