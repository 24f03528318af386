"""The sites of a loaded model: which it has, and hooks on the modules where they are.

Where they are says app.catalog.architectures, the one table. A model that is not listed there,
or that vLLM runs by another implementation than the table was written for, is refused by name.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from app.catalog.architectures import ARCHITECTURES, Architecture, Tap
from app.steering.spec import Site
from worker.engine.environment import UnsupportedEngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig

    Work = Callable[[torch.Tensor, torch.Tensor | None], None]

# vLLM has no implementation of its own of these: its transformers backend runs them.
_BY_TRANSFORMERS = frozenset({"GPTNeoXForCausalLM", "Olmo2ForCausalLM"})
_TRANSFORMERS_CLASS = "TransformersForCausalLM"


def architecture_of(config: ModelConfig) -> tuple[str, Architecture]:
    """Return a model's architecture; raise UnsupportedEngineError when it is not in the table."""
    names = list(config.hf_config.architectures or ())
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    msg = (
        f"Tiller does not know where {', '.join(names) or 'this model'} keeps its residual "
        f"stream; it serves {', '.join(sorted(ARCHITECTURES))}"
    )
    raise UnsupportedEngineError(msg)


def site_widths(config: VllmConfig) -> dict[Site, int]:
    """Say which sites can be served and how many numbers a row has at each.

    Raises UnsupportedEngineError for an architecture that is not in the table.
    """
    model = config.model_config
    _, architecture = architecture_of(model)
    sites = architecture.sites(model.hf_text_config.to_dict())
    hidden, z = model.get_hidden_size(), head_count(model) * model.get_head_size()
    # Heads are spread over the ranks of a tensor parallel group; each rank sees its own alone.
    spread = config.parallel_config.tensor_parallel_size > 1
    return {
        site: z if site is Site.z else hidden for site in sites if not (site is Site.z and spread)
    }


def head_count(config: ModelConfig) -> int:
    """Return how many attention heads a layer has, over all ranks."""
    return int(config.model_arch_config.total_num_attention_heads)


def refuse_other_implementation(model: nn.Module, config: ModelConfig) -> Architecture:
    """Return the architecture of a loaded model; raise when another class than expected runs it."""
    name, architecture = architecture_of(config)
    expected = _TRANSFORMERS_CLASS if name in _BY_TRANSFORMERS else name
    if type(model).__name__ != expected:
        msg = f"vLLM runs {name} as {type(model).__name__}; Tiller knows it as {expected} only"
        raise UnsupportedEngineError(msg)
    return architecture


def decoder_layers(model: nn.Module, architecture: Architecture) -> Iterator[tuple[int, nn.Module]]:
    """Give the decoder layers that this rank owns, with their numbers."""
    for number, layer in enumerate(model.get_submodule(architecture.layers).children()):
        if type(layer).__name__ != "PPMissingLayer":
            yield number, layer


def hook(layer: nn.Module, tap: Tap, work: Work) -> None:
    """Call `work` with the tensors of a site whenever a layer runs; it changes them in place."""
    module = layer.get_submodule(tap.module) if tap.module else layer
    if tap.side == "output":
        module.register_forward_hook(_after_pair(work) if tap.pair else _after(work))
    else:
        # Layers are called with positions and masks too; other modules with the stream alone.
        names = ("hidden_states", "residual") if not tap.module else None
        places = _places(module, names) if names else (0, 1)
        module.register_forward_pre_hook(
            _before(work, places, names or ("x", "residual"), pair=tap.pair), with_kwargs=True
        )


def _after_pair(work: Work) -> Callable[[Any, Any, Any], None]:
    return lambda _module, _args, output: work(output[0], output[1])


def _after(work: Work) -> Callable[[Any, Any, Any], None]:
    def after(_module: Any, _args: Any, output: Any) -> None:
        # Attention of the transformers backend gives its weights beside what it adds.
        work(output[0] if isinstance(output, tuple) else output, None)

    return after


def _before(
    work: Work, places: tuple[int, int], names: tuple[str, str], *, pair: bool
) -> Callable[[Any, Any, Any], None]:
    def given(args: tuple[Any, ...], kwargs: Mapping[str, Any], which: int) -> Any:
        place = places[which]
        return args[place] if place < len(args) else kwargs.get(names[which])

    def before(_module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        work(given(args, kwargs, 0), given(args, kwargs, 1) if pair else None)

    return before


def _places(module: nn.Module, names: tuple[str, str]) -> tuple[int, int]:
    """Find where a layer takes hidden states and residual."""
    parameters = list(inspect.signature(module.forward).parameters)
    found = [parameters.index(name) if name in parameters else len(parameters) for name in names]
    if names[0] not in parameters:
        msg = f"{type(module).__name__} takes {parameters}, not hidden_states"
        raise UnsupportedEngineError(msg)
    return found[0], found[1]
