"""Run requests in one batch and see what the scheduler did with each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.completions.salt import salt_for
from app.completions.spec import RequestSpec
from tests.engine.engines import ACCOUNT
from tests.engine.watching import scheduler
from tests.parity.asked import Asked, to_spec
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Outcome

_numbers = itertools.count()


@dataclass
class Seen:
    """By key of a request: steps of more than one row, preemptions, cached tokens.

    `together` is the largest number of requests in one step.
    """

    chunks: Counter[str] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)
    cached: dict[str, int] = field(default_factory=dict)
    together: int = 0


@dataclass(frozen=True)
class Ran:
    """Outcomes in the order of the requests, their keys, and what was seen."""

    outcomes: list[Outcome]
    keys: list[str]
    seen: Seen


def own_salt(spec: RequestSpec) -> str:
    """Return the salt that the service gives."""
    return salt_for(ACCOUNT, spec)


def run(
    engine: VllmEngine,
    asked: Sequence[Asked],
    *,
    salt: Callable[[RequestSpec], str] = own_salt,
) -> Ran:
    """Run requests that all enter the engine, in order, before its next step."""
    specs = [to_spec(one, engine.vectors) for one in asked]
    keys = [f"parity-{next(_numbers)}" for _ in specs]

    async def everything() -> list[Outcome]:
        with engine.core.held():
            tasks = [
                asyncio.ensure_future(engine.run(key, spec, salt=salt(spec)))
                for key, spec in zip(keys, specs, strict=True)
            ]
            # The first turn starts the requests, the second hands them to the engine's thread.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))

    with _watched(engine) as seen:
        outcomes = asyncio.run(everything())
    return Ran(outcomes, keys, seen)


@contextlib.contextmanager
def _watched(engine: VllmEngine) -> Iterator[Seen]:
    seen = Seen()
    inner = scheduler(engine)
    schedule, generate = inner.schedule, engine.core.generate

    def watching_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        rows = output.num_scheduled_tokens
        seen.together = max(seen.together, len(rows))
        seen.chunks.update(_key(name) for name, count in rows.items() if count > 1)
        seen.preempted.update(map(_key, output.preempted_req_ids or ()))
        return output

    async def watching_generate(prompt: Any, params: Any, name: str) -> Any:
        output = await generate(prompt, params, name)
        seen.cached[_key(name)] = output.num_cached_tokens
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner, "schedule", watching_schedule)
        patch.setattr(engine.core, "generate", watching_generate)
        yield seen


def _key(engine_request: str) -> str:
    """The engine adds to a key, after a dot, what tells its choices apart."""
    return engine_request.partition(".")[0]
