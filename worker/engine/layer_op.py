"""The operation that a hooked module calls: opaque to the compiler, honest about what it changes.

torch.compile keeps the call as it is and knows that both tensors are mutated; what happens inside
is the steering core's business and depends on the step's data only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from worker.engine.environment import UnsupportedEngineError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from worker.steering.core import SteeringCore

OPS = ("tiller::work_on_pair", "tiller::work_on_tensor")
# Kept out of compiled pieces by vLLM, so that pieces of equal layers share their code.
_CACHE_OPS = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")

# The cores of this process; a hook names its core by place, so that two engines never mix.
_cores: list[SteeringCore | None] = []


def compilation_with_graphs() -> dict[str, Any]:
    """Give vLLM's compilation settings for CUDA graphs that leave our operations out.

    A graph replays kernels and no Python, so graphs end before each of our operations and begin
    anew after it, as they do around attention. No full graph spans a step.
    """
    from vllm.config import CompilationConfig

    return {
        # The first two are vLLM's default, which it adds to no list that is given.
        "splitting_ops": [*CompilationConfig._attention_ops, *_CACHE_OPS, *OPS],  # noqa: SLF001
        "cudagraph_mode": "PIECEWISE",
        "use_inductor_graph_partition": False,
    }


def refuse_graphs_over_ops(config: VllmConfig) -> None:
    """Raise UnsupportedEngineError when a CUDA graph would hold one of our operations.

    Recorded in a graph, an operation would repeat the plan of the step that was recorded.
    """
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    if compilation.cudagraph_mode is CUDAGraphMode.NONE:
        return
    reasons = {
        f"CUDA graphs of mode {compilation.cudagraph_mode} (PIECEWISE or NONE are served)": (
            compilation.cudagraph_mode is not CUDAGraphMode.PIECEWISE
        ),
        "CUDA graphs that do not end at its operations": (
            not set(OPS) <= set(compilation.splitting_ops or ())
        ),
        "graphs partitioned by Inductor": bool(compilation.use_inductor_graph_partition),
        "breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH)": is_breakable_cudagraph_enabled(),
    }
    for name, present in reasons.items():
        if present:
            msg = f"Tiller cannot steer with {name}; turn it off or use eager mode"
            raise UnsupportedEngineError(msg)


def register_core(core: SteeringCore) -> int:
    """Make a core callable from hooks; returns its handle."""
    _cores.append(core)
    return len(_cores) - 1


def unregister_core(handle: int) -> None:
    """Let go of a core; hooks that still call it do nothing."""
    _cores[handle] = None


@torch.library.custom_op("tiller::work_on_pair", mutates_args=("hidden", "residual"))
def work_on_pair(hidden: torch.Tensor, residual: torch.Tensor, point: int, handle: int) -> None:
    """Steer and capture the stream hidden + residual at a point."""
    core = _cores[handle]
    if core is not None:
        core.work(point, hidden, residual)


@torch.library.custom_op("tiller::work_on_tensor", mutates_args=("hidden",))
def work_on_tensor(hidden: torch.Tensor, point: int, handle: int) -> None:
    """Steer and capture a point that is one tensor."""
    core = _cores[handle]
    if core is not None:
        core.work(point, hidden)


def _nothing(*_arguments: object) -> None:
    """Stand in while the compiler traces: both operations return nothing."""


work_on_pair.register_fake(_nothing)
work_on_tensor.register_fake(_nothing)
