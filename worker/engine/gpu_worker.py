"""vLLM's GPU worker with its model runner steered; it runs the V1 runner only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu_worker import Worker

from worker.engine.lifeline import die_with_parent
from worker.engine.runner import SteeredRunner, refuse_unseen_on_gpus, refuse_unserved
from worker.engine.scheduler import zeroed
from worker.engine.settings import engine_settings

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class SteeredGPUWorker(Worker):
    """Named as `worker_cls` on CUDA; refuses the V2 runner, which orders its batch otherwise."""

    steered: SteeredRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be steered before anything is allocated."""
        super().__init__(*args, **kwargs)
        refuse_unserved(self.vllm_config)
        refuse_unseen_on_gpus(self.vllm_config)
        if self.parallel_config.world_size > 1 and not engine_settings(self.vllm_config).in_process:
            die_with_parent()

    def init_device(self) -> None:
        """Make the runner, then wrap it."""
        super().init_device()
        self.steered = SteeredRunner(self.model_runner, self.vllm_config, self.rank)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Prepare the zeroing of blocks that `ZeroingAsyncScheduler` asks for."""
        super().initialize_from_config(zeroed(kv_cache_config))
        # Which graphs there will be is settled here, when attention has had its say.
        refuse_unseen_on_gpus(self.vllm_config)

    def shutdown(self) -> None:
        """Let go of the core before the model goes."""
        if hasattr(self, "steered"):
            self.steered.close()
        super().shutdown()
