"""Every request has its own: ids, parameters, vectors and rows never pass to another request."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.completions.spec import RequestSpec
from app.steering.spec import Capture, Op, Site
from tests.engine.engines import run_alone, run_together
from tests.engine.watching import steering_core, until
from tests.faultlist.asking import (
    LAST,
    SAME,
    add,
    moved,
    moved_between,
    numbers_of,
    prompt_of,
    request,
    rows_of,
    succeeded,
    tokens_of,
    vector,
)
from worker.engine import runner as engine_runner
from worker.engine import sampling as engine_sampling
from worker.engine import vllm_engine
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Outcome
from worker.steering.carrier import CARRIER_KEY

P = 6


def test_ids_that_begin_with_each_other_keep_their_vectors_and_rows_apart(
    engine: VllmEngine,
) -> None:
    keys = ["a", "a-1", "a-1-2", "a.0", "a.0.0", "a0", "job-1", "job-12", "0_a", "1_a-1"]
    names = [vector(engine, seed=seed) for seed in range(len(keys))]
    specs = [request(prompt_of(P, seed=seed), add(name)) for seed, name in enumerate(names)]
    together = run_under(engine, dict(zip(keys, specs, strict=True)))
    for spec, name, outcome in zip(specs, names, together, strict=True):
        plain = run_alone(engine, replace(spec, interventions=()))
        change = rows_of(outcome) - rows_of(plain)
        assert np.allclose(change, numbers_of(engine, name), atol=SAME)


def test_the_same_request_object_runs_twice_and_is_steered_twice(engine: VllmEngine) -> None:
    spec = request(prompt_of(P), add(vector(engine)))
    plain = run_alone(engine, replace(spec, interventions=()))
    first, second = run_alone(engine, spec), run_alone(engine, spec)
    both = run_together(engine, [spec, spec])
    for outcome in (first, second, *both):
        assert moved_between(plain, outcome) == set(range(P + 3))


def test_with_parameters_that_are_shared_and_emptied_the_second_run_is_unsteered(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what protects us (new parameters, never emptied, and `seen`) the fault is back."""
    spec = request(prompt_of(P), add(vector(engine, size=200.0)), captures=(), forced=False)
    plain = tokens_of(run_alone(engine, replace(spec, interventions=())))
    steered = tokens_of(run_alone(engine, spec))
    assert steered != plain
    monkeypatch.setattr(engine_sampling, "to_params", made_once(engine_sampling.to_params))
    emptying(monkeypatch)
    assert tokens_of(run_alone(engine, spec)) == steered
    refused = run_alone(engine, spec)
    assert getattr(refused, "code", None) == "steering_failed"  # `seen` alone still tells
    monkeypatch.setattr(vllm_engine, "_flagged", lambda _flags: None)
    assert tokens_of(run_alone(engine, spec)) == plain


def made_once(to_params: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[object, Any] = {}

    def shared(sampling: object, *args: Any, **kwargs: Any) -> Any:
        if sampling not in made:
            made[sampling] = to_params(sampling, *args, **kwargs)
        return made[sampling]

    return shared


def emptying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runner take the carrier out of the caller's parameters, as others do."""
    welcome = engine_runner.SteeredRunner._welcome

    def popping(self: Any, scheduler_output: Any) -> None:
        welcome(self, scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params.extra_args:
                new.sampling_params.extra_args.pop(CARRIER_KEY, None)

    monkeypatch.setattr(engine_runner.SteeredRunner, "_welcome", popping)


def test_two_ops_at_one_layer_both_act_in_their_order(engine: VllmEngine) -> None:
    steer = add(vector(engine, seed=1))
    away = replace(add(vector(engine, seed=2)), op=Op.orthogonal, coeff=0.0)
    captures = (
        Capture("rows", Site.resid_post, (LAST,)),
        Capture("before", Site.resid_post, (LAST,), before=True),
    )
    u = unit(numbers_of(engine, away.vector)[0])
    v = numbers_of(engine, steer.vector)[0].astype(np.float64)
    for ops, expected in (
        ((steer, away), lambda x: without(x + v, u)),
        ((away, steer), lambda x: without(x, u) + v),
        ((steer, steer, away), lambda x: without(x + 2 * v, u)),
    ):
        outcome = run_alone(engine, request(prompt_of(P), *ops, captures=captures))
        before = rows_of(outcome, capture=1).astype(np.float64)
        assert np.allclose(rows_of(outcome), expected(before), atol=SAME)
    # The order matters here, or the test would prove nothing.
    assert np.abs(without(v[None], u) - v).max() > 0.1


def unit(row: np.ndarray) -> np.ndarray:
    return row.astype(np.float64) / np.linalg.norm(row.astype(np.float64))


def without(rows: np.ndarray, u: np.ndarray) -> np.ndarray:
    return rows - np.outer(rows @ u, u)


def test_captures_of_one_name_and_one_layer_hold_the_rows_of_their_own_request(
    engine: VllmEngine,
) -> None:
    specs = [request(prompt_of(4 + seed, seed=seed)) for seed in range(5)]
    together = run_together(engine, specs)
    assert len({succeeded(outcome).captures[0].path for outcome in together}) == len(specs)
    for spec, outcome in zip(specs, together, strict=True):
        assert np.allclose(rows_of(outcome), rows_of(run_alone(engine, spec)), atol=SAME)


def test_requests_without_any_op_or_capture_shift_nobodys_rows(engine: VllmEngine) -> None:
    """The core never hears of them, but their rows stand in the batch like all others."""
    plain = [
        request(prompt_of(3 + 7 * seed, seed=seed), captures=(), forced=False, max_tokens=9)
        for seed in range(4)
    ]
    steered = [
        request(prompt_of(5 + 4 * seed, seed=9), add(vector(engine, seed=seed)), max_tokens=5)
        for seed in range(4)
    ]
    mixed = [spec for pair in zip(plain, steered, strict=True) for spec in pair]
    together = run_together(engine, mixed)
    for spec, outcome in zip(mixed, together, strict=True):
        alone = run_alone(engine, spec)
        assert tokens_of(outcome) == tokens_of(alone)
        if spec.captures:
            assert np.allclose(rows_of(outcome), rows_of(alone), atol=SAME)


def test_rows_of_a_layer_do_not_depend_on_which_others_are_captured(engine: VllmEngine) -> None:
    """A view of a row would change when a later layer adds to the stream in place."""
    whole = request(prompt_of(P), add(vector(engine), layer=1))
    single = [
        replace(whole, captures=(Capture("rows", Site.resid_post, (layer,)),)) for layer in range(4)
    ]
    everything, *alone = run_together(engine, [whole, *single])
    for layer, outcome in enumerate(alone):
        assert np.array_equal(rows_of(outcome, layer), rows_of(everything, layer))


def test_300_different_interventions_act_each_with_its_own_strength(engine: VllmEngine) -> None:
    """More than any table of slots: requests join as others leave, 64 at a time."""
    name = vector(engine)
    scales = np.linspace(-3.0, 3.0, 300)
    captures = (Capture("rows", Site.resid_post, (LAST,)),)
    specs = [
        request((5, 9), add(name, scale=float(scale)), captures=captures, max_tokens=2)
        for scale in scales
    ]
    plain = rows_of(run_alone(engine, replace(specs[0], interventions=())))
    found = [rows_of(outcome) - plain for outcome in run_together(engine, specs)]
    expected = scales[:, None, None] * numbers_of(engine, name)
    assert np.allclose(found, expected, atol=SAME)
    until(lambda: steering_core(engine).tenants == 0)


def test_several_choices_beside_steered_requests_are_those_of_a_quiet_engine(
    engine: VllmEngine,
) -> None:
    drawn = {"n": 3, "seed": 4, "temperature": 1.0, "max_tokens": 6}
    several = request(prompt_of(P), captures=(), forced=False, **drawn)
    steered = [request(prompt_of(P, seed=seed), add(vector(engine))) for seed in range(8)]
    alone = succeeded(run_alone(engine, several)).choices
    beside = succeeded(run_together(engine, [*steered[:4], several, *steered[4:]])[4]).choices
    assert [choice.token_ids for choice in beside] == [choice.token_ids for choice in alone]
    assert len({choice.token_ids for choice in alone}) == 3


def test_norm_match_measures_the_whole_stream(engine: VllmEngine) -> None:
    """Hidden and residual together, also for numbers whose squares are beyond float32."""
    huge = vector(engine, size=1e30)
    captures = (
        Capture("rows", Site.resid_post, (LAST,)),
        Capture("before", Site.resid_post, (LAST,), before=True),
    )
    spec = request(prompt_of(P), add(huge, scale=0.5, norm_match=True), captures=captures)
    outcome = run_alone(engine, spec)
    before, after = rows_of(outcome, capture=1), rows_of(outcome)
    lengths = np.linalg.norm(after - before, axis=1) / np.linalg.norm(before, axis=1)
    assert np.allclose(lengths, 0.5, rtol=1e-4)
    assert moved(engine, spec) == set(range(P + 3))


def run_under(engine: VllmEngine, specs: dict[str, RequestSpec]) -> list[Outcome]:
    """Run requests together under keys of our choice."""

    async def everything() -> list[Outcome]:
        with engine.core.held():
            tasks = [
                asyncio.ensure_future(engine.run(key, spec, salt=key))
                for key, spec in specs.items()
            ]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))

    return asyncio.run(everything())


def test_vllms_own_classes_stay_as_they_are_while_an_engine_steers(engine: VllmEngine) -> None:
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert moved(engine, request(prompt_of(P), add(vector(engine)))) == set(range(P + 3))
    wrapped = ("load_model", "_update_states", "_prepare_inputs", "_model_forward", "execute_model")
    for owner, names in ((LLM, ("generate", "chat")), (AsyncLLM, ("generate",))):
        assert all(getattr(owner, name).__module__.startswith("vllm.") for name in names)
    for name in wrapped:
        assert inspect.unwrap(getattr(GPUModelRunner, name)).__module__.startswith("vllm.")


def test_a_hundred_stretches_of_one_replace_act_as_one_op(engine: VllmEngine) -> None:
    """What exclusions part into pieces meets no limit of ops at a point."""
    name = vector(engine, rows=200)
    ops = [replace(add(name), op=Op.replace, row=at, positions=(at,)) for at in range(0, 200, 2)]
    captures = (Capture("rows", Site.resid_post, (LAST,)),)
    rows = rows_of(
        run_alone(engine, request(prompt_of(200), *ops, captures=captures, max_tokens=1))
    )
    assert np.allclose(rows[::2], numbers_of(engine, name)[::2], atol=SAME)
