"""The operation that a decoder layer calls: opaque to the compiler, honest about what it changes.

torch.compile keeps the call as it is and knows that both tensors are mutated; what happens inside
is the steering core's business and depends on the step's data only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from worker.steering.core import SteeringCore

# The cores of this process; a layer names its core by place, so that two engines never mix.
_cores: list[SteeringCore | None] = []


def register_core(core: SteeringCore) -> int:
    """Make a core callable from layers; returns its handle."""
    _cores.append(core)
    return len(_cores) - 1


def unregister_core(handle: int) -> None:
    """Let go of a core; layers that still call it do nothing."""
    _cores[handle] = None


@torch.library.custom_op("tiller::after_layer_pair", mutates_args=("hidden", "residual"))
def after_layer_pair(hidden: torch.Tensor, residual: torch.Tensor, layer: int, handle: int) -> None:
    """Steer and capture the stream hidden + residual after a layer."""
    core = _cores[handle]
    if core is not None:
        core.layer(layer, hidden, residual)


@torch.library.custom_op("tiller::after_layer_single", mutates_args=("hidden",))
def after_layer_single(hidden: torch.Tensor, layer: int, handle: int) -> None:
    """Steer and capture the stream after a layer that returns it whole."""
    core = _cores[handle]
    if core is not None:
        core.layer(layer, hidden)


def _nothing(*_arguments: object) -> None:
    """Stand in while the compiler traces: both operations return nothing."""


after_layer_pair.register_fake(_nothing)
after_layer_single.register_fake(_nothing)
