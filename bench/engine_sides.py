"""The engines that are compared, each in its process: plain vLLM, ours, vllm-lens.

`python -m bench.engine_sides CONFIG` loads one and then times whatever turn comes in. After each
turn, and outside of the time, every row is checked: it was counted as steered, and the lowest
steered layer moved as the op says against the captured-only run of the same prompts.
"""

import asyncio
import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from app.steering.spec import Site
from bench.workload import (
    MODEL,
    SCALE,
    Load,
    Rows,
    Turn,
    position_vectors,
    prompts,
    share_right,
    spec_of,
    steered_by,
    turn_from_line,
    vectors,
    widen,
)

SHARE_MIN = 0.99  # a row in another batch may round elsewhere before the layer; most may not


@dataclass(frozen=True, slots=True)
class SideConfig:
    """What a side is told.

    Models run in a process below the side, as vLLM's do; with `in_process` ours does not.
    `binding` is how the threads of the others are set: "same" as ours, or "auto" by vLLM.
    """

    kind: str
    folder: Path
    mode: str
    in_process: bool
    binding: str
    load: Load

    def limits(self) -> dict[str, Any]:
        """Give the engine arguments that all sides share."""
        return {
            "max_model_len": self.load.context,
            "max_num_seqs": self.load.batch,
            "max_num_batched_tokens": 2048,
        }


class TimedSide(Protocol):
    """An engine that times turns."""

    def run(self, turn: Turn) -> float:
        """Time one turn; give tokens a second."""

    def close(self) -> None:
        """End its processes."""


class Movement:
    """Compares rows read while steering with those of the same prompts read without."""

    def __init__(self, load: Load, *, steps: float, share_min: float) -> None:
        """Accept `steps` roundings to bfloat16, in at least `share_min` of a request's numbers."""
        self._load = load
        self._steps = steps
        self._share_min = share_min
        self._before: dict[tuple[int, int], list[Rows]] = {}

    def see(self, turn: Turn, lowest: Sequence[Rows], vectors_of: Rows) -> None:
        """Look at what a turn captured of its lowest captured layer, [rows, width] a request."""
        layer, prompt = turn.captured[0], self._load.prompt
        if not turn.steered:
            self._before = {(layer, turn.round): [rows[:prompt] for rows in lowest], **self._before}
            self._before = {key: rows for key, rows in self._before.items() if key[1] == turn.round}
            return
        before = self._before.get((layer, turn.round))
        if before is None or turn.steered[0] != layer or turn.positions:
            return
        for request, (was, rows) in enumerate(zip(before, lowest, strict=True)):
            op = turn.op(request)
            expected = steered_by(op, was, vectors_of[turn.vector(request), layer])
            share = share_right(was, rows[:prompt], expected, steps=self._steps)
            assert share > self._share_min, (
                f"{turn.name}, request {request} ({op}): {share:.3f} of its numbers moved right"
            )


def _plain_llm(config: SideConfig) -> Any:
    from worker.engine.environment import prepare_environment

    prepare_environment()
    if config.binding == "same":
        # As ours: a thread for each CPU, bound to none. By default vLLM binds one to each
        # physical core and may leave cores out.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    from vllm import LLM

    return LLM(
        str(config.folder),
        dtype="bfloat16",
        kv_cache_memory_bytes=config.load.kv_cache_mb << 20,
        enforce_eager=config.mode == "eager",
        enable_prefix_caching=config.load.prefix_caching,
        **config.limits(),
    )


class PlainSide:
    """vLLM as it is."""

    def __init__(self, config: SideConfig) -> None:
        """Load the model."""
        self._load = config.load
        self._llm = _plain_llm(config)

    def run(self, turn: Turn) -> float:
        """Time the turn's prompts, whatever the turn would steer."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=self._load.tokens, temperature=0.0, ignore_eos=True)
        inputs = [{"prompt_token_ids": ids} for ids in prompts(self._load, turn.round)]
        started = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()


class LensSide:
    """vLLM with vllm-lens beside it, which forces eager mode; adds vectors only."""

    def __init__(self, config: SideConfig) -> None:
        """Load the model; the plugin installs itself."""
        self._load = config.load
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # it sends vectors as pickles
        self._llm = _plain_llm(config)
        self._vectors = vectors(config.load)
        # It adds in bfloat16: the sum and the vector are each rounded once more than ours.
        self._movement = Movement(config.load, steps=4.0, share_min=0.95)

    def run(self, turn: Turn) -> float:
        """Time one turn."""
        inputs = [{"prompt_token_ids": ids} for ids in prompts(self._load, turn.round)]
        params = [self._params(turn, request) for request in range(len(inputs))]
        started = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        if turn.captured:
            read = [output.activations["residual_stream"].float().numpy() for output in outputs]
            shape = (len(turn.captured), self._load.rows)
            assert all(rows.shape[:2] == shape for rows in read), [rows.shape for rows in read]
            self._movement.see(turn, [rows[0] for rows in read], self._vectors)
        return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()

    def _params(self, turn: Turn, request: int) -> Any:
        import torch
        from vllm import SamplingParams

        # By its name: only the environment of this side has it.
        lens = importlib.import_module("vllm_lens")
        assert not turn.mixed
        assert not turn.positions
        extra: dict[str, Any] = {}
        if turn.steered:
            rows = self._vectors[turn.vector(request), list(turn.steered)]
            extra["apply_steering_vectors"] = [
                lens.SteeringVector(
                    activations=torch.from_numpy(rows),
                    layer_indices=list(turn.steered),
                    scale=SCALE,
                )
            ]
        if turn.captured:
            extra["output_residual_stream"] = list(turn.captured)
        # A set of its own for each request and turn: it takes what it reads out of it.
        return SamplingParams(
            max_tokens=self._load.tokens, temperature=0.0, ignore_eos=True, extra_args=extra
        )


class SteeredSide:
    """Our engine."""

    def __init__(self, config: SideConfig) -> None:
        """Start the engine and store the vectors."""
        from worker.engine.vllm_engine import EngineConfig, VllmEngine

        self._load = load = config.load
        self._scratch = tempfile.TemporaryDirectory()
        self._loop = asyncio.new_event_loop()
        engine_config = EngineConfig(
            model_name=MODEL,
            model_path=config.folder,
            revision="bench",
            dtype="bfloat16",
            kv_cache_bytes=load.kv_cache_mb << 20,
            scratch_dir=Path(self._scratch.name),
            mode=config.mode,
            in_process=config.in_process,
            prefix_caching=load.prefix_caching,
            **config.limits(),
        )
        self._engine = self._loop.run_until_complete(VllmEngine.start(engine_config))
        self._vectors = vectors(load)
        for number, rows in enumerate(self._vectors):
            self._engine.vectors.put(f"sv_bench_{number}", rows)
        self._has_positions = False
        self._movement = Movement(load, steps=2.0, share_min=SHARE_MIN)

    def run(self, turn: Turn) -> float:
        """Time one turn."""
        if turn.positions and not self._has_positions:
            self._has_positions = True
            for number, rows in enumerate(position_vectors(self._load)):
                self._engine.vectors.put(f"sv_positions_{number}", rows)
        load = self._load
        drawn = prompts(load, turn.round)
        specs = [spec_of(turn, number, ids, load) for number, ids in enumerate(drawn)]

        async def everything() -> list[Any]:
            runs = [self._engine.run(f"{n}", spec, salt="bench") for n, spec in enumerate(specs)]
            return list(await asyncio.gather(*runs))

        started = time.perf_counter()
        outcomes = self._loop.run_until_complete(everything())
        seconds = time.perf_counter() - started
        self._check(turn, outcomes)
        tokens = sum(outcome.completion_tokens for outcome in outcomes)
        for outcome in outcomes:
            outcome.release()
        return float(tokens / seconds)

    def close(self) -> None:
        """End the engine."""
        self._loop.run_until_complete(self._engine.shutdown())

    def _check(self, turn: Turn, outcomes: list[Any]) -> None:
        from worker.outcomes import Succeeded

        for outcome in outcomes:
            assert isinstance(outcome, Succeeded), outcome
            points = [(Site.resid_post, layer) for layer in turn.steered]
            counted = [outcome.steered_rows[point] for point in points]
            rows = turn.positions or self._load.rows
            assert counted == [rows] * len(counted), (turn.name, counted)
        if turn.captured:
            lowest = [outcome.captures[0].layers[turn.captured[0]] for outcome in outcomes]
            self._movement.see(turn, [widen(np.asarray(r)) for r in lowest], self._vectors)


KINDS: dict[str, type[PlainSide | SteeredSide | LensSide]] = {
    "plain": PlainSide,
    "steered": SteeredSide,
    "lens": LensSide,
}


def main() -> None:
    """Be one side: read turns, answer with tokens a second, until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # whatever vLLM prints is not an answer
    fields = json.loads(sys.argv[1])
    fields = {**fields, "folder": Path(fields["folder"]), "load": Load(**fields["load"])}
    config = SideConfig(**fields)
    side: TimedSide = KINDS[config.kind](config)
    answers.write(json.dumps({"tokens_per_s": 0.0}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps({"tokens_per_s": side.run(turn_from_line(line))}) + "\n")
    with contextlib.suppress(Exception):
        side.close()
    os._exit(0)  # vLLM's threads would keep the process; what it measured has been sent


if __name__ == "__main__":
    main()
