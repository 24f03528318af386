"""The canary passes on a sound engine and fails when any part of steering is broken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from worker.engine.canary import CanaryError, prove_steering
from worker.engine.vllm_engine import VllmEngine
from worker.steering import core as steering_core
from worker.steering import layer as steering_layer

Layer = Callable[..., None]


def test_canary_passes_on_a_sound_engine(engine: VllmEngine) -> None:
    report = asyncio.run(prove_steering(engine, engine.vectors))
    assert report.layer == 2
    assert report.move_error < 1e-6


def _silent(_original: Layer) -> Layer:
    return lambda *_args: None


def _one_layer_late(original: Layer) -> Layer:
    return lambda plan, layer, *rest: original(plan, max(layer - 1, 0), *rest)


def _every_row(original: Layer) -> Layer:
    def broken(plan, layer, hidden, residual, table):
        if plan.steer[layer] is not None:
            residual += 1.0
        original(plan, layer, hidden, residual, table)

    return broken


def _read_only(original: Layer) -> Layer:
    def broken(plan, layer, hidden, residual, table):
        original(plan, layer, hidden.clone(), residual.clone(), table)

    return broken


def _half_the_scale(original: Layer) -> Layer:
    def broken(plan, layer, hidden, residual, table):
        if plan.steer[layer] is not None:
            plan.steer[layer].delta.mul_(0.5)
        original(plan, layer, hidden, residual, table)

    return broken


@pytest.mark.parametrize(
    "break_it", [_silent, _one_layer_late, _every_row, _read_only, _half_the_scale]
)
def test_canary_fails_with_a_broken_hook(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[Layer], Layer]
) -> None:
    monkeypatch.setattr(steering_core, "apply_layer", break_it(steering_layer.apply_layer))
    with pytest.raises(CanaryError):
        asyncio.run(prove_steering(engine, engine.vectors))
