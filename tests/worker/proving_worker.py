"""`python -m tests.worker.proving_worker --model NAME`: the real worker; a file says how it proves.

PROOF_FILE holds a word, read anew at every start of the engine and every proof: `passes`, `fails`,
`dies` (the engine, in the middle of the proof) or `broken` (the engine does not start).
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from app.catalog import ServedModel
from app.kit.logs import configure_logs
from tests.faults.stub_engine import StubEngine
from worker.__main__ import serve
from worker.engine.canary import CanaryError
from worker.engine.protocol import Engine
from worker.engine.vectors import VectorCache
from worker.settings import load_worker_settings

SHUTDOWN_SECONDS = 1.0  # some heartbeats long, as that of a real engine


class SlowToEnd(StubEngine):
    """Takes its time to stop; may be told to die."""

    def die(self) -> None:
        """Be dead from now on."""
        self._dead = True

    async def shutdown(self) -> None:
        """Stop after some heartbeats."""
        await asyncio.sleep(SHUTDOWN_SECONDS)


def word() -> str:
    """Read what is to happen."""
    return Path(os.environ["PROOF_FILE"]).read_text(encoding="utf-8")


async def start(model: ServedModel, scratch: Path) -> Engine:
    """Start the engine, or fail to."""
    del scratch
    if word() == "broken":
        msg = "the engine does not start"
        raise RuntimeError(msg)
    return SlowToEnd(model=model.name)


async def prove(engine: Engine, vectors: VectorCache) -> None:
    """Prove what the file says."""
    del vectors
    said = word()
    if said == "dies":
        assert isinstance(engine, SlowToEnd)
        engine.die()
        await engine.check_health()  # says that it is dead
    if said == "fails":
        msg = "layer 3 did not move"
        raise CanaryError(msg)


def main() -> int:
    """Serve one model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    configure_logs("worker")
    return serve(load_worker_settings(), arguments.model, start, prove)


if __name__ == "__main__":
    sys.exit(main())
