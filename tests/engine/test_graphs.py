"""CUDA graphs, as far as a machine without a GPU can tell: graphs end at our operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worker.engine import layer_op
from worker.engine.environment import UnsupportedEngineError


def resolved(**changes: Any) -> Any:
    """Resolve our compilation settings, with changes, as vLLM does for a model on CUDA."""
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.config.compilation import CompilationMode

    settings = {**layer_op.compilation_with_graphs(), **changes}
    config = VllmConfig()
    config.compilation_config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, **settings)
    config.compilation_config.set_splitting_ops_for_v1(all2all_backend="naive")
    return config


def test_graphs_end_at_every_operation_of_ours_and_at_attention() -> None:
    from vllm.config import CompilationConfig, CUDAGraphMode

    config = resolved().compilation_config
    assert config.cudagraph_mode is CUDAGraphMode.PIECEWISE
    assert set(CompilationConfig._attention_ops) < set(config.splitting_ops)
    registered = {
        name.split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("tiller::")
    }
    assert registered == {name for name in config.splitting_ops if name.startswith("tiller::")}
    layer_op.refuse_graphs_over_ops(resolved())


def test_beside_ours_graphs_end_where_vllm_ends_them_by_itself() -> None:
    ours = set(resolved().compilation_config.splitting_ops) - set(layer_op.OPS)
    assert ours == set(resolved(splitting_ops=None).compilation_config.splitting_ops)


@pytest.mark.parametrize("support", ["ALWAYS", "UNIFORM_BATCH", "NEVER"])
def test_no_attention_backend_turns_our_graphs_into_full_ones(support: str) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    config = resolved()
    config.compilation_config.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport[support], "backend", 1, 1
    )
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.PIECEWISE
    layer_op.refuse_graphs_over_ops(config)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"cudagraph_mode": "FULL"}, "FULL"),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, "FULL_DECODE_ONLY"),
        ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, "FULL_AND_PIECEWISE"),
        ({"splitting_ops": None}, "do not end at its operations"),
        ({"splitting_ops": ["vllm::unified_attention", layer_op.OPS[0]]}, "do not end"),
        ({"use_inductor_graph_partition": True}, "Inductor"),
    ],
)
def test_graphs_that_would_hold_an_operation_are_refused(
    changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(UnsupportedEngineError, match=name):
        layer_op.refuse_graphs_over_ops(resolved(**changes))


def test_graphs_broken_up_at_attention_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    with pytest.raises(UnsupportedEngineError, match="BREAKABLE"):
        layer_op.refuse_graphs_over_ops(resolved())


def test_without_graphs_nothing_is_refused() -> None:
    layer_op.refuse_graphs_over_ops(resolved(cudagraph_mode="NONE", splitting_ops=[]))
