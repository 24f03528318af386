"""How an engine's processes hang together: one process for scheduler and model, tied to ours.

vLLM's CPU platform turns its own single-process executor into a second process, because thread
settings must be in the environment before OpenMP starts. `VllmEngine` sets them before it spawns
the engine process, so one process is enough here.
"""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from worker.engine.lifeline import die_with_parent
from worker.engine.settings import engine_settings


class OneProcessExecutor(UniProcExecutor):
    """Scheduler and model in the engine process."""

    def _init_executor(self) -> None:
        settings = engine_settings(self.vllm_config)
        if not settings.in_process:
            die_with_parent(settings.parent_pid)
        super()._init_executor()


class ManyProcessExecutor(MultiprocExecutor):
    """One process a rank; each also ends with the engine process."""

    def _init_executor(self) -> None:
        settings = engine_settings(self.vllm_config)
        if not settings.in_process:
            die_with_parent(settings.parent_pid)
        super()._init_executor()
