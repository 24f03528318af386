"""Do something in the middle of an engine's work, at a step that is known beforehand."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.watching import scheduler, until
from worker.engine.in_process import InProcessCore
from worker.engine.vllm_engine import VllmEngine


@contextlib.contextmanager
def at_step(engine: VllmEngine, number: int, action: Callable[[], None]) -> Iterator[Counter[str]]:
    """Call `action` on the engine's thread before its step `number` (1 is the next one).

    Gives the tokens that were scheduled, counted by engine request id.
    """
    inner = scheduler(engine)
    schedule, scheduled, steps = inner.schedule, Counter[str](), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == number:
            action()
        output = schedule(*args, **kwargs)
        scheduled.update(output.num_scheduled_tokens)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner, "schedule", interrupted)
        yield scheduled


def cancel_from_engine(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]
) -> None:
    """Cancel a task from the engine's thread and wait until the engine is told to abort it."""
    core = engine.core
    assert isinstance(core, InProcessCore)
    loop.call_soon_threadsafe(task.cancel)
    until(lambda: bool(core._commands))
