"""Cached prefixes are shared by equal interventions of one account, and by nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Intervention, Op, Site
from tests.engine.engines import ACCOUNT, run_alone
from tests.engine.watching import watched
from tests.reference import plain_forward
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Succeeded

# Three whole blocks of 32 tokens and a rest.
PROMPT = 100


def test_equal_interventions_share_and_a_different_one_never_does(
    engine: VllmEngine, tiny_llama: Path
) -> None:
    numbers = np.random.default_rng(11)
    for name in ("sv_one", "sv_other"):
        engine.vectors.put(name, numbers.normal(size=64).astype(np.float32))
    one = Intervention(Op.add, Site.resid_post, 1, "sv_one", 0)
    for item in (
        None,
        one,
        replace(one, vector="sv_other"),
        replace(one, scale=-1.0),
        replace(one, layer=2),
        replace(one, norm_match=True),
        replace(one, positions=(0,)),
        replace(one, spans=((0, 50),)),
    ):
        spec = request(seed=1, interventions=() if item is None else (item,))
        assert cached(engine, spec, tiny_llama) == 0, item
        assert cached(engine, spec, tiny_llama) == 96, item


def test_scale_zero_shares_with_plain(engine: VllmEngine, tiny_llama: Path) -> None:
    engine.vectors.put("sv_zero", np.ones(64, dtype=np.float32))
    nothing = Intervention(Op.add, Site.resid_post, 1, "sv_zero", 0, scale=0.0)
    assert cached(engine, request(seed=2), tiny_llama) == 0
    assert cached(engine, request(seed=2, interventions=(nothing,)), tiny_llama) == 96


def test_accounts_never_share(engine: VllmEngine, tiny_llama: Path) -> None:
    assert cached(engine, request(seed=3), tiny_llama) == 0
    assert cached(engine, request(seed=3), tiny_llama, account=UUID(int=2)) == 0


def test_a_captured_request_reads_no_cache_and_has_all_its_rows(
    engine: VllmEngine, tiny_llama: Path
) -> None:
    assert cached(engine, request(seed=4), tiny_llama) == 0
    captured = replace(request(seed=4), captures=(Capture("rows", Site.resid_post, (3,)),))
    with watched(engine) as seen:
        outcome = run_alone(engine, captured)
    assert seen.cached == [0]
    assert isinstance(outcome, Succeeded)
    assert outcome.captures[0].layers[3].shape == (PROMPT + 4 - 1, 64)


@pytest.mark.parametrize("repeat", [1, 2])
def test_steered_rows_count_what_ran_and_leave_out_what_came_from_the_cache(
    engine: VllmEngine, repeat: int
) -> None:
    engine.vectors.put("sv_count", np.ones(64, dtype=np.float32))
    span = Intervention(Op.add, Site.resid_post, 2, "sv_count", 0, spans=((10, 98),))
    outcome = run_alone(engine, request(seed=5, interventions=(span,)))
    assert isinstance(outcome, Succeeded)
    assert outcome.steered_rows == {(Site.resid_post, 2): 88 if repeat == 1 else 2}


def cached(engine: VllmEngine, spec: RequestSpec, model: Path, *, account: UUID = ACCOUNT) -> int:
    """Run a request, check its tokens against the reference, return its cached tokens."""
    with watched(engine) as seen:
        outcome = run_alone(engine, spec, account=account)
    assert isinstance(outcome, Succeeded)
    tokens = list(outcome.choices[0].token_ids)
    edits = [
        {
            "layer": item.layer,
            "rows": np.load(engine.vectors.path(item.vector)),  # noqa: TID251 (allow_pickle is off)
            "scale": item.scale,
            "norm_match": item.norm_match,
            **({} if item.positions is None else {"positions": item.positions}),
            **({} if item.spans is None else {"spans": item.spans}),
        }
        for item in spec.interventions
    ]
    reference = plain_forward.load(model)
    _, logits = plain_forward.forward(reference, [*spec.prompt_token_ids, *tokens[:-1]], edits)
    assert logits[PROMPT - 1 :].argmax(axis=-1).tolist() == tokens
    return seen.cached[0]


def request(*, seed: int, interventions: tuple[Intervention, ...] = ()) -> RequestSpec:
    numbers = np.random.default_rng(seed)
    return RequestSpec(
        prompt_token_ids=tuple(int(token) for token in numbers.integers(3, 256, size=PROMPT)),
        prompt=None,
        sampling=Sampling(max_tokens=4, temperature=0.0, ignore_eos=True),
        interventions=interventions,
    )
