"""CUDA graphs, as far as a machine without a GPU can tell: graphs end at our operations."""

from __future__ import annotations

import torch

from worker.engine import layer_op


def test_graphs_end_at_every_operation_of_ours_and_at_attention() -> None:
    from vllm.config import CompilationConfig, CUDAGraphMode

    config = CompilationConfig(**layer_op.compilation_with_graphs())
    assert config.cudagraph_mode is CUDAGraphMode.PIECEWISE
    assert config.splitting_ops is not None
    assert set(CompilationConfig._attention_ops) < set(config.splitting_ops)
    registered = {
        name.split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("tiller::")
    }
    assert registered == {name for name in config.splitting_ops if name.startswith("tiller::")}
