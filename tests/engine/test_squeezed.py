"""Little room and small steps: preemption and chunked prefill neither lose nor double a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.engines import engine_for, run_together
from tests.engine.mixes import Case, mixed_cases, worst_error
from tests.engine.watching import watched
from tests.reference import plain_forward
from worker.engine.vllm_engine import VllmEngine


@pytest.fixture(scope="module")
def squeezed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """12 KV blocks of 32 tokens, and at most 64 tokens a step."""
    with engine_for(
        tiny_llama,
        tmp_path_factory.mktemp("scratch"),
        kv_cache_bytes=12 * 65_536,
        max_num_batched_tokens=64,
    ) as started:
        yield started


def test_preempted_requests_equal_the_reference(squeezed: VllmEngine, tiny_llama: Path) -> None:
    cases = cases_for(squeezed, seed=2, prompt_max=40, tokens_max=60)
    with watched(squeezed) as seen:
        outcomes = run_together(squeezed, [case.spec for case in cases])
    assert seen.preemptions > 0
    model = plain_forward.load(tiny_llama)
    assert max(worst_error(model, *pair) for pair in zip(cases, outcomes, strict=True)) <= 1e-5


def test_prompts_in_chunks_equal_the_reference(squeezed: VllmEngine, tiny_llama: Path) -> None:
    cases = cases_for(squeezed, seed=3, prompt_max=220, tokens_max=9)
    with watched(squeezed) as seen:
        outcomes = run_together(squeezed, [case.spec for case in cases])
    assert sum(chunks > 1 for chunks in seen.chunks.values()) >= 5
    model = plain_forward.load(tiny_llama)
    assert max(worst_error(model, *pair) for pair in zip(cases, outcomes, strict=True)) <= 1e-5


def cases_for(engine: VllmEngine, **changes: int) -> list[Case]:
    return mixed_cases(engine.vectors, count=24, n_layers=4, width=64, vocab=256, **changes)
