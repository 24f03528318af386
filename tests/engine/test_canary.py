"""The canary passes on a sound engine and fails when any part of steering is broken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from app.steering.spec import Site
from tests.engine.watching import steering_core as steering_core_of
from worker.engine.canary import CanaryError, prove_steering
from worker.engine.vllm_engine import VllmEngine
from worker.steering import core as steering_core
from worker.steering import layer as steering_layer
from worker.steering.core import SteeringCore

Work = Callable[..., None]


def test_canary_passes_on_a_sound_engine(engine: VllmEngine) -> None:
    report = asyncio.run(prove_steering(engine, engine.vectors))
    assert report.layer == 2
    assert report.move_error < 1e-6


@pytest.mark.parametrize("site", [site for site in Site if site is not Site.resid_post])
def test_canary_fails_when_one_site_is_not_reached(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    shape = steering_core_of(engine).shape
    silent = {shape.point(site, layer) for layer in range(shape.n_layers)}
    original = SteeringCore._on_tensors

    def deaf(core: SteeringCore, point: int, *tensors: torch.Tensor) -> None:
        if point in silent:
            tensors = tuple(tensor if tensor is None else tensor.clone() for tensor in tensors)
        original(core, point, *tensors)

    monkeypatch.setattr(SteeringCore, "_on_tensors", deaf)
    with pytest.raises(CanaryError, match=site.value):
        asyncio.run(prove_steering(engine, engine.vectors))


def _silent(_original: Work) -> Work:
    return lambda *_args: None


def _every_row(original: Work) -> Work:
    def broken(work, hidden, residual, *rest):
        if work.steer is not None:
            residual += 1.0
        original(work, hidden, residual, *rest)

    return broken


def _read_only(original: Work) -> Work:
    def broken(work, hidden, residual, *rest):
        original(work, hidden.clone(), residual.clone(), *rest)

    return broken


def _half_the_scale(original: Work) -> Work:
    def broken(work, *rest):
        if work.steer is not None:
            work.steer.delta.mul_(0.5)
        original(work, *rest)

    return broken


@pytest.mark.parametrize("break_it", [_silent, _every_row, _read_only, _half_the_scale])
def test_canary_fails_with_a_broken_hook(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[Work], Work]
) -> None:
    monkeypatch.setattr(steering_core, "apply_work", break_it(steering_layer.apply_work))
    with pytest.raises(CanaryError):
        asyncio.run(prove_steering(engine, engine.vectors))


def test_canary_fails_when_hooks_are_one_layer_late(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SteeringCore._on_tensors
    monkeypatch.setattr(
        SteeringCore, "_on_tensors", lambda core, point, *rest: original(core, point - 1, *rest)
    )
    with pytest.raises(CanaryError):
        asyncio.run(prove_steering(engine, engine.vectors))
