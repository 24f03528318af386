"""`python -m worker --model NAME`: serve one model until told to stop."""

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from app.catalog import ServedModel, load_catalog
from app.kit.logs import configure_logs
from worker.celery_worker import build_worker
from worker.engine.canary import prove_steering
from worker.engine.protocol import Engine, EngineDeadError
from worker.models.settings import load_fetch_settings
from worker.service import (
    EXIT_CANARY_FAILED,
    EXIT_ENGINE_DEAD,
    Prove,
    StartEngine,
    SteeringNotProvenError,
    ToldToStopError,
    WorkerService,
)
from worker.settings import WorkerSettings, load_worker_settings

log = logging.getLogger("worker")


async def start_vllm(model: ServedModel, scratch: Path) -> Engine:
    """Start vLLM with steering hooks for a model of the catalog."""
    # Imported here: it takes seconds, and a wrong argument should be answered before.
    from worker.engine.vllm_engine import EngineConfig, VllmEngine

    config = EngineConfig(
        model_name=model.name,
        model_path=model.path,
        revision=model.revision,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        kv_cache_bytes=model.kv_cache_bytes,
        mode=model.mode,
        compile_cache=_compile_cache() if model.mode == "compiled" else None,
        threads=model.threads,
        tensor_parallel_size=model.tensor_parallel_size,
        pipeline_parallel_size=model.pipeline_parallel_size,
        scratch_dir=scratch,
    )
    return await VllmEngine.start(config)


def _compile_cache() -> Path:
    return load_fetch_settings().cache_dir / "compiled"


def serve(
    settings: WorkerSettings, model_name: str, start_engine: StartEngine, prove: Prove
) -> int:
    """Run one worker to its end; return the exit status."""
    model = load_catalog(settings.models_file).get(model_name)
    service = WorkerService(settings, model, start_engine, prove)
    _end_on_sigterm(service)
    try:
        service.start()
    except SteeringNotProvenError:
        log.exception("steering is not proven: taking no work")
        service.die(EXIT_CANARY_FAILED)
    except ToldToStopError:
        service.die(0)
    except EngineDeadError:
        log.exception("the engine died while it started")
        service.die(EXIT_ENGINE_DEAD)
    except Exception:
        log.exception("the worker could not start")
        service.die(1)
    build_worker(service, settings.redis_url).start()
    service.stop()
    logging.shutdown()
    # vLLM and Celery leave non-daemon threads behind; everything of ours is closed by now.
    os._exit(0)


def _end_on_sigterm(service: WorkerService) -> None:
    """Answer SIGTERM until Celery takes over: end at once unless work may have been taken."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        # Celery, which starts next, sees it and shuts down in order.
        service.stopping.request("told to stop")
        if not service.takes_work:
            # In a thread: the handler may have interrupted somebody who holds a lock.
            threading.Thread(target=service.die, args=(0,), name="sigterm", daemon=True).start()

    signal.signal(signal.SIGTERM, on_signal)


def main() -> int:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--model", required=True, help="a name from models.toml")
    arguments = parser.parse_args()
    configure_logs("worker")
    return serve(load_worker_settings(), arguments.model, start_vllm, prove_steering)


if __name__ == "__main__":
    sys.exit(main())
