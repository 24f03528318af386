"""Single requests at the edges, and failures that stay with the request they belong to."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Intervention, Op, Site
from tests.engine.engines import run_alone, run_together
from tests.engine.mixes import mixed_cases, worst_error
from tests.engine.watching import scheduler, steering_core, until, watched
from tests.reference import plain_forward
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Errored, Outcome, Succeeded
from worker.steering import core as core_module

ROWS = (Capture("rows", Site.resid_post, (0, 3)),)
PROMPT = (5, 9, 17, 33)


def test_one_token_gives_as_many_rows_as_the_prompt_has(engine: VllmEngine) -> None:
    outcome = succeeded(run_alone(engine, request(max_tokens=1, captures=ROWS)))
    assert len(outcome.choices[0].token_ids) == 1
    assert outcome.choices[0].finish_reason == "length"
    assert outcome.captures[0].layers[3].shape == (len(PROMPT), 64)


def test_a_stop_string_cuts_the_text_and_keeps_every_token_and_row(engine: VllmEngine) -> None:
    # One token, one word of text: none of these is special, none begins another.
    drawn = tuple(range(100, 256))
    whole = request(max_tokens=8, allowed_token_ids=drawn)
    free = succeeded(run_alone(engine, whole)).choices[0]
    words = free.text.split()
    stop = words[4]
    count = words.index(stop) + 1
    cut = request(max_tokens=8, allowed_token_ids=drawn, stop=(stop,), captures=ROWS)
    outcome = succeeded(run_alone(engine, cut))
    choice = outcome.choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.text.split() == words[: count - 1]
    assert choice.token_ids == free.token_ids[:count]
    assert outcome.captures[0].layers[0].shape == (len(PROMPT) + count - 1, 64)


def test_choices_of_a_request_draw_with_seeds_of_their_own(engine: VllmEngine) -> None:
    several = request(max_tokens=6, n=3, temperature=1.0, seed=4)
    choices = succeeded(run_alone(engine, several)).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    for index, choice in enumerate(choices):
        single = request(max_tokens=6, temperature=1.0, seed=4 + index)
        assert succeeded(run_alone(engine, single)).choices[0].token_ids == choice.token_ids


def test_an_aborted_request_leaves_engine_core_and_disk(engine: VllmEngine) -> None:
    folder = engine._config.scratch_dir / "captures"
    engine.vectors.put("sv_abort", np.ones(64, dtype=np.float32))
    steer = Intervention(Op.add, Site.resid_post, 1, "sv_abort", 0)
    spec = request(max_tokens=200, captures=ROWS, interventions=(steer,))
    core = steering_core(engine)
    left = len(list(folder.iterdir()))

    async def abort() -> None:
        task = asyncio.ensure_future(engine.run("to-abort", spec, salt="abort"))
        async with asyncio.timeout(10):
            while core.tenants == 0:  # noqa: ASYNC110 (the core has no event to wait for)
                await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(abort())
    until(lambda: core.tenants == 0 and not scheduler(engine).has_requests())
    assert len(list(folder.iterdir())) == left
    assert isinstance(run_alone(engine, request(max_tokens=2)), Succeeded)


def test_the_last_request_leaves_the_core_on_a_step_without_tokens(engine: VllmEngine) -> None:
    with watched(engine) as seen:
        succeeded(run_alone(engine, request(max_tokens=2, captures=ROWS)))
        until(lambda: steering_core(engine).tenants == 0)
    assert seen.steps_without_tokens == 1


def _gone(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _other_width(path: Path) -> None:
    np.save(path, np.ones((1, 63), dtype=np.float32))


def _not_finite(path: Path) -> None:
    np.save(path, np.full((1, 64), np.nan, dtype=np.float32))


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (_gone, "unknown_vector"),
        (_cut, "steering_failed"),
        (_other_width, "steering_failed"),
        (_not_finite, "steering_failed"),
    ],
)
def test_a_spoiled_vector_errors_its_request_alone(
    engine: VllmEngine, tiny_llama: Path, spoil: Callable[[Path], None], code: str
) -> None:
    name = f"sv{spoil.__name__}"
    engine.vectors.put(name, np.ones(64, dtype=np.float32))
    spoil(engine.vectors.path(name))
    bad = request(max_tokens=4, interventions=(Intervention(Op.add, Site.resid_post, 1, name, 0),))
    assert_alone(engine, tiny_llama, bad, code)


def test_a_vector_that_was_never_stored_errors_its_request_alone(
    engine: VllmEngine, tiny_llama: Path
) -> None:
    unknown = Intervention(Op.add, Site.resid_post, 1, "sv_never", 0)
    bad = request(max_tokens=4, interventions=(unknown,))
    assert_alone(engine, tiny_llama, bad, "unknown_vector")


def test_a_plan_that_raises_errors_its_request_alone(
    engine: VllmEngine, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.vectors.put("sv_raises", np.ones(64, dtype=np.float32))
    build_plan = core_module.build_plan

    def raising(runs: Any, *rest: Any) -> Any:
        programs = [run.tenant.program for run in runs if run.tenant.program]
        if any(key.vector == "sv_raises" for program in programs for key in program.keys):
            raise ValueError("a defect of the plan")
        return build_plan(runs, *rest)

    monkeypatch.setattr(core_module, "build_plan", raising)
    steer = Intervention(Op.add, Site.resid_post, 1, "sv_raises", 0)
    bad = request(max_tokens=4, interventions=(steer,), captures=ROWS)
    assert_alone(engine, tiny_llama, bad, "steering_failed")


def assert_alone(engine: VllmEngine, model_path: Path, bad: RequestSpec, code: str) -> None:
    """Run a bad request in the middle of good ones, which must equal the reference."""
    cases = mixed_cases(engine.vectors, count=12, n_layers=4, width=64, vocab=256, seed=5)
    specs = [case.spec for case in cases]
    outcomes = run_together(engine, [*specs[:6], bad, *specs[6:]])
    failed = outcomes.pop(6)
    assert isinstance(failed, Errored)
    assert failed.code == code
    model = plain_forward.load(model_path)
    assert max(worst_error(model, *pair) for pair in zip(cases, outcomes, strict=True)) <= 1e-5
    until(lambda: steering_core(engine).tenants == 0)


def request(
    *,
    captures: tuple[Capture, ...] = (),
    interventions: tuple[Intervention, ...] = (),
    **sampling: Any,
) -> RequestSpec:
    drawn = Sampling(temperature=0.0, ignore_eos=True)
    return RequestSpec(
        prompt_token_ids=PROMPT,
        prompt=None,
        sampling=dataclasses.replace(drawn, **sampling),
        interventions=interventions,
        captures=captures,
    )


def succeeded(outcome: Outcome) -> Succeeded:
    assert isinstance(outcome, Succeeded), outcome
    return outcome
