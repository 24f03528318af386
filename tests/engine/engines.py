"""Start engines inside the test process, one at a time: vLLM keeps its state per process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

from app.completions.salt import salt_for
from app.completions.spec import RequestSpec
from worker.engine.vllm_engine import EngineConfig, VllmEngine
from worker.outcomes import Outcome

ACCOUNT = UUID(int=1)
_keys = itertools.count()


def config_for(model: Path, scratch: Path, **changes: Any) -> EngineConfig:
    """Return a small in-process float32 configuration, with changes."""
    values: dict[str, Any] = {
        "model_name": model.name,
        "model_path": model,
        "revision": "test",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "kv_cache_bytes": 64 << 20,
        "scratch_dir": scratch,
        "in_process": True,
        "block_size": 32,
    }
    return EngineConfig(**{**values, **changes})


@contextlib.contextmanager
def engine_for(model: Path, scratch: Path, **changes: Any) -> Iterator[VllmEngine]:
    """Start an in-process engine and shut it down afterwards."""
    engine = asyncio.run(VllmEngine.start(config_for(model, scratch, **changes)))
    try:
        yield engine
    finally:
        asyncio.run(engine.shutdown())


def run_together(
    engine: VllmEngine, specs: list[RequestSpec], *, account: UUID = ACCOUNT
) -> list[Outcome]:
    """Run requests that all enter the engine before its next step."""

    async def everything() -> list[Outcome]:
        with engine.core.held():
            tasks = [
                asyncio.ensure_future(
                    engine.run(f"test-{next(_keys)}", spec, salt=salt_for(account, spec))
                )
                for spec in specs
            ]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))

    return asyncio.run(everything())


def run_alone(engine: VllmEngine, spec: RequestSpec, *, account: UUID = ACCOUNT) -> Outcome:
    """Run one request."""
    return run_together(engine, [spec], account=account)[0]
