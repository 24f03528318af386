"""The adapter: a steering core plugged into one vLLM model runner (V1), by wrapping its methods.

    load_model      -> hooks on the sites of every layer (before profiling and compiling)
    _update_states  -> requests come and go; also on steps without tokens
    _prepare_inputs -> the plan of the step, from the batch order of this very step
    _model_forward  -> the hooks do their work; then rows and progress are stored
    execute_model   -> rows that feed the logits are checked

Only this instance is wrapped; other runners of the process are untouched. Profiling and dummy
runs pass through none of the planning and find the core inert.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from worker.engine import layer_op
from worker.engine.architectures import (
    decoder_layers,
    head_count,
    hook,
    refuse_other_implementation,
    site_widths,
)
from worker.engine.environment import UnsupportedEngineError, check_signature
from worker.engine.settings import EngineSettings, engine_settings
from worker.steering.board import StatusBoard
from worker.steering.carrier import CARRIER_KEY
from worker.steering.core import SteeringCore
from worker.steering.points import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_log = logging.getLogger(__name__)
_SIGNATURES = {
    "load_model": ("load_dummy_weights",),
    "_update_states": ("scheduler_output",),
    "_prepare_inputs": ("scheduler_output", "num_scheduled_tokens"),
    "_model_forward": ("input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
    "execute_model": ("scheduler_output", "intermediate_tensors"),
}


def refuse_unserved(config: VllmConfig) -> None:
    """Raise UnsupportedEngineError for settings under which rows are reordered or sharded."""
    parallel = config.parallel_config
    reasons = {
        "speculative decoding": config.speculative_config is not None,
        "sequence parallelism": parallel.use_sequence_parallel_moe or parallel.enable_hc_sp,
        "micro-batching": bool(parallel.enable_dbo),
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        # Requests would be spread over engines that each think they are rank 0 of the board.
        "data parallelism (start more workers instead)": parallel.data_parallel_size > 1,
        # Vectors and captured rows are files of this machine.
        "ranks on several machines": parallel.nnodes > 1,
        "fast prefill with KV sharing": bool(config.cache_config.kv_sharing_fast_prefill),
        "the V2 model runner": bool(config.use_v2_model_runner),
    }
    for name, present in reasons.items():
        if present:
            msg = f"Tiller cannot steer with {name}; turn it off"
            raise UnsupportedEngineError(msg)


def refuse_unseen_on_gpus(config: VllmConfig) -> None:
    """Raise UnsupportedEngineError for what works on CPUs and was not seen working on a GPU."""
    if config.parallel_config.pipeline_parallel_size > 1:
        msg = (
            "Tiller has not been seen steering with pipeline parallelism on a GPU; "
            "set it to 1 and use tensor parallelism"
        )
        raise UnsupportedEngineError(msg)
    layer_op.refuse_graphs_over_ops(config)


class SteeredRunner:
    """Wraps a runner and owns its steering core."""

    def __init__(self, runner: GPUModelRunner, config: VllmConfig, rank: int) -> None:
        """Check what we rely on and wrap the runner; its model is not loaded yet."""
        refuse_unserved(config)
        self._runner = runner
        self._settings: EngineSettings = engine_settings(config)
        self._config = config
        self._rank = rank
        self.core: SteeringCore | None = None
        self._handle = -1
        wrappers = {
            "load_model": self._wrap_load_model,
            "_update_states": self._wrap_update_states,
            "_prepare_inputs": self._wrap_prepare_inputs,
            "_model_forward": self._wrap_model_forward,
            "execute_model": self._wrap_execute_model,
        }
        for name, wrap in wrappers.items():
            original = getattr(runner, name)
            check_signature(original, _SIGNATURES[name])
            setattr(runner, name, wrap(original))

    def close(self) -> None:
        """Make the hooks inert for good, and let go of what requests hold."""
        if self._handle >= 0:
            layer_op.unregister_core(self._handle)
        if self.core is not None:
            self.core.close()

    def _wrap_load_model(self, original: Callable[..., None]) -> Callable[..., None]:
        def load_model(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self._attach(self._runner.get_model())

        return load_model

    def _attach(self, model: nn.Module) -> None:
        model_config = self._config.model_config
        architecture = refuse_other_implementation(model, model_config)
        layers = dict(decoder_layers(model, architecture))
        dtype = model_config.dtype
        assert isinstance(dtype, torch.dtype)  # vLLM resolves names such as "auto"
        self.core = SteeringCore(
            shape=Shape(
                n_layers=model_config.get_total_num_hidden_layers(),
                widths=site_widths(self._config),
                n_heads=head_count(model_config),
                dtype=dtype,
                device=self._runner.device,
                here=range(min(layers, default=0), max(layers, default=-1) + 1),
            ),
            board=StatusBoard(
                self._settings.board_path, ranks=self._config.parallel_config.world_size
            ),
            vectors=self._settings.vectors_path,
            rank=self._rank,
            captures=self._rank % self._config.parallel_config.tensor_parallel_size == 0,
        )
        self._handle = layer_op.register_core(self.core)
        for number, layer in layers.items():
            for site in self.core.shape.widths:
                point = self.core.shape.point(site, number)
                hook(layer, architecture.taps[site], self._work_at(point))

    def _work_at(self, point: int) -> Callable[[torch.Tensor, torch.Tensor | None], None]:
        handle, core = self._handle, self.core
        assert core is not None
        if self._settings.mode == "eager":
            # Nothing traces this: straight into the core, without the dispatcher's toll.
            return partial(core.work, point)

        def work(hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
            if residual is None:
                torch.ops.tiller.work_on_tensor(hidden, point, handle)
            else:
                torch.ops.tiller.work_on_pair(hidden, residual, point, handle)

        return work

    def _wrap_update_states(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update_states(scheduler_output: Any) -> Any:
            try:
                self._welcome(scheduler_output)
            except Exception:  # noqa: BLE001 (the forward pass serves others, too)
                _log.exception("requests could not be registered")
            return original(scheduler_output)

        return update_states

    def _welcome(self, scheduler_output: Any) -> None:
        core = self.core
        if core is None:
            return
        core.dismiss(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            carried = params.extra_args.get(CARRIER_KEY) if params and params.extra_args else None
            if not carried:
                continue
            if "temperature" in carried:
                # Above vLLM's own limit of 2, so it travels beside the checked parameters.
                params.temperature = carried["temperature"]
            if "ticket" in carried:
                core.admit(new.req_id, carried)

    def _wrap_prepare_inputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            prepared = original(scheduler_output, num_scheduled_tokens)
            core = self.core
            if core is not None:
                try:
                    batch = self._runner.input_batch
                    core.prepare(
                        batch.req_ids,
                        np.asarray(num_scheduled_tokens),
                        batch.num_computed_tokens_cpu[: len(batch.req_ids)],
                    )
                except Exception:  # noqa: BLE001 (the forward pass serves others, too)
                    _log.exception("a step could not be planned")
                    core.abandon_step()
            return prepared

        return prepare_inputs

    def _wrap_model_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def model_forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            core = self.core
            if core is not None:
                try:
                    core.finish()
                except Exception:  # noqa: BLE001 (the forward pass serves others, too)
                    _log.exception("a step could not be stored")
                    core.abandon_step()
            return output

        return model_forward

    def _wrap_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
            output = original(scheduler_output, intermediate_tensors)
            core, state = self.core, self._runner.execute_model_state
            if core is not None and state is not None and state.sample_hidden_states is not None:
                try:
                    core.check_outputs(state.sample_hidden_states)
                except Exception:  # noqa: BLE001 (the forward pass serves others, too)
                    _log.exception("a step's outputs could not be checked")
                    core.abandon_step()
            return output

        return execute_model
