"""Look into a running in-process engine: what its scheduler did, what its steering core holds."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from worker.engine.in_process import InProcessCore
from worker.engine.vllm_engine import VllmEngine
from worker.steering.core import SteeringCore


@dataclass
class Watched:
    """What happened while watching: steps, chunks and blocks by engine request id, cached tokens.

    `cached` is in the order of arrival of the answers, `preempted` in that of the preemptions.
    """

    preempted: list[str] = field(default_factory=list)
    steps_without_tokens: int = 0
    chunks: Counter[str] = field(default_factory=Counter)
    blocks: set[int] = field(default_factory=set)
    cached: list[int] = field(default_factory=list)

    @property
    def preemptions(self) -> int:
        """How often a request was preempted."""
        return len(self.preempted)


@contextlib.contextmanager
def watched(engine: VllmEngine) -> Iterator[Watched]:
    """Watch an engine's scheduler and answers."""
    seen = Watched()
    inner = scheduler(engine)
    schedule, generate = inner.schedule, engine.core.generate

    def watching_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        seen.preempted += sorted(output.preempted_req_ids or ())
        seen.steps_without_tokens += output.total_num_scheduled_tokens == 0
        seen.chunks.update(key for key, rows in output.num_scheduled_tokens.items() if rows > 1)
        for new in output.scheduled_new_reqs:
            seen.blocks.update(*new.block_ids)
        for blocks in output.scheduled_cached_reqs.new_block_ids:
            if blocks:
                seen.blocks.update(*blocks)
        return output

    async def watching_generate(*args: Any, **kwargs: Any) -> Any:
        output = await generate(*args, **kwargs)
        seen.cached.append(output.num_cached_tokens)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner, "schedule", watching_schedule)
        patch.setattr(engine.core, "generate", watching_generate)
        yield seen


def scheduler(engine: VllmEngine) -> Any:
    """Return vLLM's scheduler."""
    assert isinstance(engine.core, InProcessCore)
    return engine.core.llm.engine_core.engine_core.scheduler


def steering_core(engine: VllmEngine) -> SteeringCore:
    """Return the engine's steering core."""
    assert isinstance(engine.core, InProcessCore)
    executor = engine.core.llm.engine_core.engine_core.model_executor
    core = executor.driver_worker.worker.steered.core
    assert isinstance(core, SteeringCore)
    return core


def until(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """Wait for a condition; fail when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)
