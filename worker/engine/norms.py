"""Measures how long the rows of a model's residual stream typically are, at every layer.

A few neutral sentences go through the worker's own engine with a capture that reduces to norms.
The first position is left out: its rows are often a hundred times longer than all others.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Reduce, Site
from worker.outcomes import Succeeded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.engine.protocol import Engine

    EncodeText = Callable[[str], Sequence[int]]

SENTENCES = (
    "The library opens at nine in the morning and closes at six, except on public holidays.",
    "Water boils at a lower temperature on a high mountain, because the air is thinner there.",
    "She put the letter on the kitchen table, took her coat and went out to catch the early train.",
    "To make the dough, mix flour, salt and yeast, add warm water and knead it for ten minutes.",
    "The committee will meet again in April to discuss the budget for the coming year.",
    "A function takes its arguments, does its work and returns a value to whoever called it.",
)
TOKENS_MIN, TOKENS_MAX = 4, 64


def neutral_prompts(
    encode: EncodeText, *, vocab_size: int, max_model_len: int
) -> list[tuple[int, ...]]:
    """Give the prompts to measure with: sentences, or any tokens where they make too few."""
    longest = min(TOKENS_MAX, max_model_len - 1)
    prompts = [tuple(encode(text))[:longest] for text in SENTENCES]
    # A vocabulary that knows none of these words gives the same unknown token again and again.
    kept = [ids for ids in prompts if len(set(ids)) >= TOKENS_MIN]
    step = max(1, vocab_size // longest)
    return kept or [tuple(range(0, vocab_size, step))[:longest]]


async def measure_norms(
    engine: Engine, prompts: Sequence[tuple[int, ...]]
) -> tuple[float, ...] | None:
    """Give, for every layer, the mean of the prompts' median norms at resid_post.

    None when a prompt does not run to its end or a norm is not finite. Raises EngineDeadError.
    """
    layers = tuple(range(engine.facts.n_layers))
    capture = Capture(name="norms", site=Site.resid_post, layers=layers, reduce=Reduce.norm)
    medians = await asyncio.gather(
        *(_medians(engine, f"norms-{place}", ids, capture) for place, ids in enumerate(prompts))
    )
    found = [each for each in medians if each is not None]
    if len(found) < len(prompts):
        return None
    norms = np.mean(found, axis=0)
    return tuple(map(float, norms)) if np.isfinite(norms).all() else None


async def _medians(
    engine: Engine, key: str, ids: tuple[int, ...], capture: Capture
) -> list[float] | None:
    spec = RequestSpec(
        prompt_token_ids=ids,
        prompt=None,
        sampling=Sampling(max_tokens=1, temperature=0.0),
        captures=(capture,),
    )
    outcome = await engine.run(key, spec, salt=key)
    if not isinstance(outcome, Succeeded):
        return None
    try:
        (rows,) = outcome.captures
        return [float(np.median(rows.layers[layer][1:])) for layer in capture.layers]
    finally:
        outcome.release()
