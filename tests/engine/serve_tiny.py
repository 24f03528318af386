"""Serve a model from a process of its own until killed: prints a line when the canary passed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from worker.engine.canary import prove_steering
from worker.engine.vllm_engine import EngineConfig, VllmEngine


async def serve(model: Path, scratch: Path) -> None:
    """Start, prove, say so, and wait."""
    engine = await VllmEngine.start(
        EngineConfig(
            model_name="tiny",
            model_path=model,
            revision="test",
            dtype="float32",
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            kv_cache_bytes=16 << 20,
            scratch_dir=scratch,
            block_size=32,
            threads=1,
        )
    )
    await prove_steering(engine, engine.vectors)
    print("proven", flush=True)  # noqa: T201 (the parent waits for it)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
