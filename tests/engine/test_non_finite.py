"""A request that produces NaN leaves nothing behind in the KV blocks that others get next."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Intervention, Op, Site
from tests.engine.engines import engine_for, run_alone, run_together
from tests.engine.tiny_model import make_tiny_llama
from tests.engine.watching import watched
from worker.engine import scheduler as engine_scheduler
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Errored, Outcome, Succeeded

# The embedding of this token is NaN, so whatever follows it in a prompt is NaN in every layer.
POISON = 200
# 65,536 bytes a block of 32 tokens: 40 blocks, of which four poisoned requests fill 32.
KV_BYTES = 40 * 65_536
EVERYWHERE = Capture("rows", Site.resid_post, (0, 1, 2, 3))


@pytest.fixture(scope="module")
def poisoned_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "poisoned-llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_50_clean_requests_that_reuse_the_blocks_of_a_nan_request_equal_a_clean_run(
    poisoned_llama: Path, tmp_path: Path
) -> None:
    with engine_for(
        poisoned_llama, tmp_path, kv_cache_bytes=KV_BYTES, prefix_caching=False
    ) as engine:
        before, after = clean_poison_clean(engine)
    assert all(isinstance(outcome, Succeeded) for outcome in before)
    assert [same(*pair) for pair in zip(before, after, strict=True)] == [True] * 50


def test_without_the_zeroing_a_nan_request_spoils_others(
    poisoned_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine_scheduler.ZeroedKVCacheConfig,
        "needs_kv_cache_zeroing",
        property(lambda _config: False),
    )
    with engine_for(
        poisoned_llama, tmp_path, kv_cache_bytes=KV_BYTES, prefix_caching=False
    ) as engine:
        before, after = clean_poison_clean(engine)
    assert all(isinstance(outcome, Succeeded) for outcome in before)
    assert not all(same(*pair) for pair in zip(before, after, strict=True))


def test_a_steer_beyond_the_dtype_errors_its_request_alone_and_is_never_written(
    engine: VllmEngine,
) -> None:
    engine.vectors.put("sv_huge", np.full(64, 3e38, dtype=np.float32))
    huge = Intervention(Op.add, Site.resid_post, 1, "sv_huge", 0, scale=2.0)
    calm = clean(5)
    alone = run_alone(engine, calm)
    too_far, beside = run_together(engine, [spec((3, 4, 5), (huge,)), calm])
    assert isinstance(too_far, Errored)
    assert too_far.code == "non_finite_activations"
    assert same(alone, beside)


def clean_poison_clean(engine: VllmEngine) -> tuple[list[Outcome], list[Outcome]]:
    clean_specs = [clean(seed) for seed in range(50)]
    before = run_together(engine, clean_specs)
    dirty = [spec((POISON, *([9 + number] * 240)), ()) for number in range(4)]
    with watched(engine) as poisoned:
        outcomes = run_together(engine, dirty)
    assert [outcome.code for outcome in outcomes if isinstance(outcome, Errored)] == [
        "non_finite_activations"
    ] * 4
    with watched(engine) as reused:
        after = run_together(engine, clean_specs)
    assert len(poisoned.blocks) >= 32
    assert poisoned.blocks <= reused.blocks
    return before, after


def clean(seed: int) -> RequestSpec:
    numbers = np.random.default_rng(seed)
    return spec(tuple(int(token) for token in numbers.integers(3, POISON, size=3 + seed % 20)), ())


def spec(prompt: tuple[int, ...], interventions: tuple[Intervention, ...]) -> RequestSpec:
    # The poison is never drawn, or a clean request could poison itself.
    drawn = tuple(range(3, POISON))
    return RequestSpec(
        prompt_token_ids=prompt,
        prompt=None,
        sampling=Sampling(max_tokens=6, temperature=0.0, ignore_eos=True, allowed_token_ids=drawn),
        interventions=interventions,
        captures=(EVERYWHERE,),
    )


def same(one: Outcome, other: Outcome) -> bool:
    if not (isinstance(one, Succeeded) and isinstance(other, Succeeded)):
        return False
    if one.choices[0].token_ids != other.choices[0].token_ids:
        return False
    return all(
        np.allclose(rows, other.captures[0].layers[layer], rtol=1e-5, atol=1e-5)
        for layer, rows in one.captures[0].layers.items()
    )
