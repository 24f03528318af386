"""Which models can be steered: where their decoder layers are and what leaves one.

A model that is not listed here is refused by name. Nothing is guessed: a wrong guess would read
and write some other tensor without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from worker.engine.environment import UnsupportedEngineError

if TYPE_CHECKING:
    from torch import nn


class Layout(StrEnum):
    """What a decoder layer returns."""

    pair = "pair"  # (hidden, residual); the stream is their sum
    single = "single"  # the stream itself


@dataclass(frozen=True, slots=True)
class Architecture:
    """`layers` is the dotted path of the ModuleList of decoder layers."""

    layers: str
    layout: Layout


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("model.layers", Layout.pair),
    "MistralForCausalLM": Architecture("model.layers", Layout.pair),
    "Qwen2ForCausalLM": Architecture("model.layers", Layout.pair),
    "Qwen3ForCausalLM": Architecture("model.layers", Layout.pair),
}


def architecture_of(model: nn.Module) -> Architecture:
    """Return the entry of a model's class; raise UnsupportedEngineError when there is none."""
    name = type(model).__name__
    found = ARCHITECTURES.get(name)
    if found is None:
        msg = (
            f"Tiller does not know where {name} keeps its residual stream; "
            f"it serves {', '.join(sorted(ARCHITECTURES))}"
        )
        raise UnsupportedEngineError(msg)
    return found


def decoder_layers(model: nn.Module, architecture: Architecture) -> list[tuple[int, nn.Module]]:
    """Return the decoder layers that this rank owns, with their numbers."""
    layers = model.get_submodule(architecture.layers)
    return [
        (number, layer)
        for number, layer in enumerate(layers.children())
        if type(layer).__name__ != "PPMissingLayer"
    ]
