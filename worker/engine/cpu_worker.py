"""vLLM's CPU worker with its model runner steered."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from worker.engine.lifeline import die_with_parent
from worker.engine.runner import SteeredRunner
from worker.engine.settings import engine_settings


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

    def shutdown(self) -> None:
        """Let go of the core before the model goes."""
        if hasattr(self, "steered"):
            self.steered.close()
        super().shutdown()
