"""vLLM's CPU worker with its model runner steered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from worker.engine.lifeline import die_with_parent
from worker.engine.runner import SteeredRunner
from worker.engine.settings import engine_settings

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class SteeredCPUWorker(CPUWorker):
    """Named as `worker_cls`; everything else of vLLM stays as it is."""

    steered: SteeredRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Tie the process to its parent, then start as vLLM does."""
        super().__init__(*args, **kwargs)
        if self.parallel_config.world_size > 1 and not engine_settings(self.vllm_config).in_process:
            die_with_parent()

    def init_device(self) -> None:
        """Make the runner, then wrap it."""
        super().init_device()
        self.steered = SteeredRunner(self.model_runner, self.vllm_config, self.rank)
        spare_unused_draws(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, then make the buffer for what the stage before this one sends.

        vLLM makes it in the profiling run, which a CPU does not have: without it the first request
        of a pipeline ends the engine.
        """
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            model: Any = runner.get_model()
            runner.intermediate_tensors = model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=self.model_config.dtype,
                device=runner.device,
            )

    def shutdown(self) -> None:
        """Let go of the core before the model goes."""
        if hasattr(self, "steered"):
            self.steered.close()
        super().shutdown()


def spare_unused_draws(runner: GPUModelRunner) -> None:
    """Keep the generators of requests whose prompt is not through yet out of sampling.

    vLLM draws a token for each of them, too, throws it away and turns the generator back. CPU
    generators cannot be turned back: one seeded request with a prompt in two chunks would end
    the engine ("CPU Generator does not use offset").
    """
    original = runner.sample_tokens

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        unfinished = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        put_aside = {
            row: batch.generators.pop(row) for row in unfinished if row in batch.generators
        }
        try:
            return original(*args, **kwargs)
        finally:
            batch.generators.update(put_aside)

    setattr(runner, "sample_tokens", sample_tokens)  # noqa: B010 (this instance's alone)
