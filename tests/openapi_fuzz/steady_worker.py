"""`python -m tests.openapi_fuzz.steady_worker --model NAME`: a real worker, an engine that answers.

The stub engine of the fault runs takes some prompts as orders to misbehave and makes one choice;
this one answers whatever the validator lets through, with every choice and logprob asked for.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from app.catalog import ServedModel
from app.completions.spec import RequestSpec
from app.kit.logs import configure_logs
from app.steering.spec import Capture, Reduce
from tests.faults.stub_engine import StubEngine, answer
from tests.faults.stub_worker import prove_nothing
from tests.fixtures.tiny_model import HIDDEN_SIZE, N_LAYERS
from worker.__main__ import serve
from worker.engine.protocol import Engine, Group, Piece
from worker.outcomes import CaptureRows, Choice, Outcome, Succeeded, TokenLogprob
from worker.settings import load_worker_settings


class SteadyEngine(StubEngine):
    """Answers at once, as its spec says."""

    def __init__(self, *, model: str) -> None:
        """Claim the shape of the tests' model."""
        super().__init__(model=model)
        self._facts = replace(self._facts, hidden_size=HIDDEN_SIZE, n_layers=N_LAYERS)

    async def run(
        self,
        key: str,
        spec: RequestSpec,
        *,
        salt: str,
        group: Group | None = None,
        urgent: bool = False,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Outcome:
        """Give every choice, whole and in one piece each."""
        del key, salt, group, urgent
        await asyncio.sleep(0)
        made = answer(spec)
        choices = tuple(_choice(spec, made.choices[0], i) for i in range(spec.sampling.n))
        prompt_logprobs = _prompt_logprobs(spec)
        for choice in choices if on_piece is not None else ():
            on_piece(
                Piece(
                    choice.index,
                    choice.text,
                    choice.token_ids,
                    choice.finish_reason,
                    token_logprobs=choice.token_logprobs,
                    top_logprobs=choice.top_logprobs,
                    prompt_logprobs=prompt_logprobs if choice.index == 0 else None,
                )
            )
        captures = tuple(_captured(capture, spec, made) for capture in spec.captures)
        return Succeeded(choices, captures, prompt_logprobs)


def _choice(spec: RequestSpec, choice: Choice, index: int) -> Choice:
    asked = spec.sampling.logprobs
    if asked is None:
        return replace(choice, index=index)
    return replace(
        choice,
        index=index,
        token_logprobs=tuple(-0.5 for _ in choice.token_ids),
        top_logprobs=tuple(_tops(token, asked) for token in choice.token_ids),
    )


def _captured(capture: Capture, spec: RequestSpec, made: Succeeded) -> CaptureRows:
    ran = spec.prompt_tokens + made.completion_tokens - 1
    positions = np.array([p for p in range(ran) if capture.reads(p)], dtype=np.int32)
    rows = min(len(positions), 1) if capture.reduce is Reduce.mean else len(positions)
    read = np.ones((rows, capture.width(HIDDEN_SIZE)), dtype=np.float32)
    return CaptureRows(
        capture.name, "float32", dict.fromkeys(capture.layers, read), positions, capture.reduce
    )


def _tops(token: int, count: int) -> tuple[TokenLogprob, ...]:
    """Give the token drawn and the `count` - 1 after it."""
    return tuple(TokenLogprob(token + i, str(token + i), -0.5 - i) for i in range(max(count, 1)))


def _prompt_logprobs(spec: RequestSpec) -> tuple[tuple[TokenLogprob, ...] | None, ...] | None:
    asked = spec.sampling.prompt_logprobs
    if asked is None:
        return None
    return (None, *(_tops(token, asked) for token in spec.prompt_token_ids[1:]))


async def start_steady(model: ServedModel, scratch: Path) -> Engine:
    """Make an engine that claims to be this model."""
    del scratch
    await asyncio.sleep(0)
    return SteadyEngine(model=model.name)


def main() -> int:
    """Serve one model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    configure_logs("worker")
    return serve(load_worker_settings(), arguments.model, start_steady, prove_nothing)


if __name__ == "__main__":
    sys.exit(main())
