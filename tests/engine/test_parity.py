"""Mixed batches against the plain reference: same rows, same greedy tokens."""

from __future__ import annotations

from pathlib import Path

from tests.engine.engines import run_together
from tests.engine.mixes import mixed_cases, worst_error
from tests.reference import plain_forward
from worker.engine.vllm_engine import VllmEngine


def test_64_mixed_requests_in_one_batch_equal_the_reference(
    engine: VllmEngine, tiny_llama: Path
) -> None:
    cases = mixed_cases(engine.vectors, count=64, n_layers=4, width=64, vocab=256, seed=1)
    outcomes = run_together(engine, [case.spec for case in cases])
    model = plain_forward.load(tiny_llama)
    errors = [worst_error(model, *pair) for pair in zip(cases, outcomes, strict=True)]
    assert max(errors) <= 1e-5
