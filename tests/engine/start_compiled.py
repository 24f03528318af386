"""Start a compiled engine in a process of its own, and print what Inductor found in its cache."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tests.engine.engines import config_for
from worker.engine.canary import prove_steering
from worker.engine.vllm_engine import VllmEngine


async def start(model: Path, scratch: Path, cache: Path) -> None:
    """Start, prove that it steers, print the counters of the cache."""
    config = config_for(model, scratch, mode="compiled", compile_cache=cache)
    engine = await VllmEngine.start(config)
    await prove_steering(engine, engine.vectors)
    from torch._dynamo.utils import counters

    seen = counters["inductor"]
    names = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    print(json.dumps([seen[name] for name in names]), flush=True)  # noqa: T201
    await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(start(*map(Path, sys.argv[1:4])))
