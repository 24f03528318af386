"""Run a group in an engine process of its own, and print how its requests ended.

One is refused before the engine hears of it, one is cancelled as soon as it was submitted.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Intervention, Op, Site
from tests.engine.engines import config_for
from worker.engine.protocol import Group
from worker.engine.vllm_engine import VllmEngine

COUNT = 12
UNKNOWN = Intervention(Op.add, Site.resid_post, 1, "sv_never", 0)


async def serve(model: Path, scratch: Path) -> None:
    """Start the engine, run the group, stop the engine."""
    engine = await VllmEngine.start(config_for(model, scratch, in_process=False, threads=1))
    specs = [
        RequestSpec(
            tuple(range(3, 20 + index)),
            None,
            Sampling(max_tokens=8, temperature=0.0, ignore_eos=True),
            (UNKNOWN,) if index == 0 else (),
        )
        for index in range(COUNT)
    ]
    tasks = [
        asyncio.ensure_future(
            engine.run(f"{index}", spec, salt=f"{index}", group=Group("served", COUNT, index))
        )
        for index, spec in enumerate(specs[:-1])
    ]
    await tasks[0]
    tasks[1].cancel()
    tasks.append(
        asyncio.ensure_future(
            engine.run("last", specs[-1], salt="last", group=Group("served", COUNT, COUNT - 1))
        )
    )
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    print(*sorted(type(each).__name__ for each in ended), flush=True)  # noqa: T201 (the answer)
    await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
