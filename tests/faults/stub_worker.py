"""`python -m tests.faults.stub_worker --model NAME`: the real worker around the stub engine."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from app.catalog import ServedModel
from app.kit.logs import configure_logs
from tests.faults.stub_engine import StubEngine
from worker.__main__ import serve
from worker.engine.protocol import Engine
from worker.engine.vectors import VectorCache
from worker.settings import load_worker_settings


async def start_stub(model: ServedModel, scratch: Path) -> Engine:
    """Make a stub engine that claims to be this model."""
    del scratch
    await asyncio.sleep(float(os.environ.get("STUB_START_SECONDS", "0")))
    seconds = float(os.environ.get("STUB_SECONDS", "0.003"))
    return StubEngine(seconds_per_request=seconds, model=model.name)


async def prove_nothing(engine: Engine, vectors: VectorCache) -> None:
    """Accept the stub as it is: it has no activations to steer."""
    del vectors
    await engine.check_health()


def main() -> int:
    """Serve one model with the stub."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    configure_logs("worker")
    return serve(load_worker_settings(), arguments.model, start_stub, prove_nothing)


if __name__ == "__main__":
    sys.exit(main())
