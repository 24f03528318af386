"""Mixed batches of Steering vectors: requests as the product sees them and the reference does.

Every op, site and form beside them is in tests/parity.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Intervention, Op, Site
from tests.reference import plain_forward
from worker.engine.vectors import VectorCache
from worker.outcomes import Outcome, Succeeded


@dataclass(frozen=True)
class Case:
    """One request and, for the reference, its edits in plain words."""

    spec: RequestSpec
    edits: list[dict[str, Any]]


def mixed_cases(
    cache: VectorCache,
    *,
    count: int,
    n_layers: int,
    width: int,
    vocab: int,
    seed: int,
    strength: float = 1.0,
    prompt_max: int = 24,
    prompts: Sequence[tuple[int, ...]] = (),
    tokens_max: int = 9,
) -> list[Case]:
    """Draw requests in turn: plain, everywhere, positions, spans, norm_match, several at once.

    Prompts are random token ids, unless `prompts` lists some to be used in turn.
    """
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    cases = []
    for index in range(count):
        prompt = tuple(rng.randrange(3, vocab) for _ in range(rng.randrange(1, prompt_max)))
        if prompts:
            prompt = prompts[index % len(prompts)]
        tokens = rng.randrange(1, tokens_max + 1)
        edits = []
        kinds = [[], ["all"], ["positions"], ["spans"], ["norm"], ["all", "positions", "norm"]]
        for kind in kinds[index % len(kinds)]:
            reach = len(prompt) + tokens - 1
            edits += _edits(
                kind, rng, numbers, reach=reach, n_layers=n_layers, width=width, strength=strength
            )
        interventions = tuple(
            _intervention(edit, cache, f"sv_{seed}_{index}_{number}")
            for number, edit in enumerate(edits)
        )
        layers = tuple(sorted(rng.sample(range(n_layers), rng.randrange(1, n_layers + 1))))
        captured = index % 5 != 0  # plain ones among those that are not
        cases.append(
            Case(
                RequestSpec(
                    prompt_token_ids=prompt,
                    prompt=None,
                    sampling=Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
                    interventions=interventions,
                    captures=(Capture("rows", Site.resid_post, layers),) if captured else (),
                ),
                edits,
            )
        )
    return cases


def worst_error(model: Any, case: Case, outcome: Outcome) -> float:
    """Return the largest relative error of a captured row; the tokens must be the greedy ones."""
    assert isinstance(outcome, Succeeded), outcome
    tokens = list(outcome.choices[0].token_ids)
    prompt = list(case.spec.prompt_token_ids)
    assert len(tokens) == case.spec.sampling.max_tokens
    streams, logits = plain_forward.forward(model, prompt + tokens[:-1], case.edits)
    assert logits[len(prompt) - 1 :].argmax(axis=-1).tolist() == tokens
    worst = 0.0
    for capture, spec in zip(outcome.captures, case.spec.captures, strict=True):
        assert tuple(capture.layers) == spec.layers
        for layer, rows in capture.layers.items():
            want = streams[layer]
            assert rows.shape == want.shape
            error = np.linalg.norm(rows - want, axis=1) / np.linalg.norm(want, axis=1)
            worst = max(worst, float(error.max()))
    return worst


def _edits(
    kind: str,
    rng: random.Random,
    numbers: np.random.Generator,
    *,
    reach: int,
    n_layers: int,
    width: int,
    strength: float,
) -> list[dict[str, Any]]:
    edit: dict[str, Any] = {"scale": rng.choice([-1.0, 0.5, 2.0]), "norm_match": kind == "norm"}
    rows = 1
    if kind == "positions":
        places = [rng.randrange(reach) for _ in range(rng.randrange(1, 5))]
        edit["positions"], rows = places, len(places)
    if kind == "spans":
        begin = rng.randrange(reach)
        edit["spans"] = [(begin, min(begin + rng.randrange(1, 4), reach))]
    if kind == "norm":
        edit["scale"] = rng.choice([-0.3, 0.4])
    layers = rng.sample(range(n_layers), rng.randrange(1, min(n_layers, 4) + 1))
    return [
        {**edit, "layer": layer, "rows": numbers.normal(size=(rows, width)) * strength}
        for layer in layers
    ]


def _intervention(edit: dict[str, Any], cache: VectorCache, name: str) -> Intervention:
    edit["rows"] = edit["rows"].astype(np.float32)
    cache.put(name, edit["rows"])
    return Intervention(
        op=Op.add,
        site=Site.resid_post,
        layer=edit["layer"],
        vector=name,
        row=0,
        scale=edit["scale"],
        norm_match=edit["norm_match"],
        summed=True,
        positions=tuple(edit["positions"]) if "positions" in edit else None,
        spans=tuple(edit["spans"]) if "spans" in edit else None,
    )
