"""A batch of 64: one makes NaN, the plan of one raises, one is cancelled; 61 are right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.completions.salt import salt_for
from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Intervention, Op, Site
from tests.engine.engines import ACCOUNT, engine_for, run_alone
from tests.engine.mixes import mixed_cases
from tests.engine.tiny_model import make_tiny_llama
from tests.engine.watching import scheduler, steering_core, until
from tests.faultlist.interrupting import at_step, cancel_from_engine
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Errored, Outcome, Succeeded
from worker.steering import core as core_module

# The embedding of this token is NaN, so whatever follows it in a prompt is NaN in every layer.
POISON = 200
NAN, RAISES, CANCELLED = 10, 30, 50


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine whose model knows one poisonous token."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "poisoned-llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with engine_for(folder, tmp_path_factory.mktemp("scratch")) as started:
        yield started


def test_61_of_64_finish_with_the_numbers_that_they_have_alone(
    poisoned: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = good_specs(poisoned)
    alone = [run_alone(poisoned, spec) for spec in good]
    raise_for(monkeypatch, "sv_raises")
    outcomes, ran = run_all(poisoned, with_bad_ones(poisoned, good))
    assert errored(outcomes.pop(CANCELLED)) == "cancelled"
    assert 0 < ran < 150  # it was in the middle of its text
    assert errored(outcomes.pop(RAISES)) == "steering_failed"
    assert errored(outcomes.pop(NAN)) == "non_finite_activations"
    assert len(outcomes) == 61
    for one, other in zip(alone, outcomes, strict=True):
        assert_equal(one, other)
    until(lambda: steering_core(poisoned).tenants == 0)
    until(lambda: not scheduler(poisoned).has_requests())
    # Whoever comes next gets the blocks, tickets and places of the three.
    for one, spec in zip(alone[:12], good[:12], strict=True):
        assert_equal(one, run_alone(poisoned, spec))


def test_a_nan_of_the_model_itself_errors_a_steered_request_that_captures_nothing(
    poisoned: VllmEngine,
) -> None:
    poisoned.vectors.put("sv_calm", np.ones(64, dtype=np.float32))
    calm = Intervention(Op.add, Site.resid_post, 1, "sv_calm", 0, spans=((0, 1),))
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    dirty, clean = (RequestSpec((5, token, 9), None, sampling, (calm,)) for token in (POISON, 6))
    assert errored(run_alone(poisoned, dirty)) == "non_finite_activations"
    assert isinstance(run_alone(poisoned, clean), Succeeded)


def good_specs(engine: VllmEngine) -> list[RequestSpec]:
    """Draw 61 plain, steered and captured requests that can neither meet nor draw the poison."""
    cases = mixed_cases(engine.vectors, count=61, n_layers=4, width=64, vocab=POISON, seed=61)
    drawn = tuple(range(3, POISON))
    return [
        replace(case.spec, sampling=replace(case.spec.sampling, allowed_token_ids=drawn))
        for case in cases
    ]


def with_bad_ones(engine: VllmEngine, good: list[RequestSpec]) -> list[RequestSpec]:
    engine.vectors.put("sv_raises", np.ones(64, dtype=np.float32))
    steer = Intervention(Op.add, Site.resid_post, 1, "sv_raises", 0)
    everything = (Capture("rows", Site.resid_post, (0, 1, 2, 3)),)
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    nan = RequestSpec((5, POISON, 9), None, sampling, captures=everything)
    raises = RequestSpec((5, 6, 7), None, sampling, (steer,), everything)
    cancelled = replace(good[1], sampling=replace(good[1].sampling, max_tokens=150))
    specs = list(good)
    for place, spec in ((NAN, nan), (RAISES, raises), (CANCELLED, cancelled)):
        specs.insert(place, spec)
    return specs


def raise_for(monkeypatch: pytest.MonkeyPatch, vector: str) -> None:
    """Let the plan of every step that holds a request with this vector raise."""
    build_plan = core_module.build_plan

    def raising(runs: Any, *rest: Any, **named: Any) -> Any:
        programs = [run.tenant.program for run in runs if run.tenant.program]
        if any(key.vector == vector for program in programs for key in program.keys):
            raise ValueError("a defect of the plan")
        return build_plan(runs, *rest, **named)

    monkeypatch.setattr(core_module, "build_plan", raising)


def run_all(engine: VllmEngine, specs: list[RequestSpec]) -> tuple[list[Outcome | str], int]:
    """Run all in one batch, cancel one before the fifth step; give also the steps that it ran."""

    async def everything() -> tuple[list[Outcome | str], int]:
        loop, tasks = asyncio.get_running_loop(), []

        def cancel() -> None:
            cancel_from_engine(engine, loop, tasks[CANCELLED])

        with at_step(engine, 5, cancel) as scheduled:
            with engine.core.held():
                tasks += [
                    asyncio.ensure_future(
                        engine.run(f"blast-{index}", spec, salt=salt_for(ACCOUNT, spec))
                    )
                    for index, spec in enumerate(specs)
                ]
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            found = await asyncio.gather(*tasks, return_exceptions=True)
        ran = sum(scheduled[key] for key in scheduled if key.startswith(f"blast-{CANCELLED}."))
        return [
            "cancelled" if isinstance(item, asyncio.CancelledError) else item for item in found
        ], ran

    return asyncio.run(everything())


def errored(outcome: Outcome | str) -> str:
    return outcome.code if isinstance(outcome, Errored) else str(outcome)


def assert_equal(one: Outcome, other: Outcome | str) -> None:
    assert isinstance(one, Succeeded), one
    assert isinstance(other, Succeeded), other
    assert one.choices[0].token_ids == other.choices[0].token_ids
    for first, second in zip(one.captures, other.captures, strict=True):
        for layer, rows in first.layers.items():
            error = np.linalg.norm(second.layers[layer] - rows, axis=1)
            assert (error <= 1e-5 * np.linalg.norm(rows, axis=1)).all()
