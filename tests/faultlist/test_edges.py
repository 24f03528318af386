"""Requests at the edges: one token in, one token out, the end of the context, stop, echo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.steering.spec import FOREVER, Intervention
from tests.engine.engines import run_alone, run_together
from tests.faultlist.asking import (
    FORCED,
    SAME,
    WIDTH,
    add,
    moved,
    numbers_of,
    prompt_of,
    request,
    rows_of,
    succeeded,
    tokens_of,
    vector,
)
from tests.reference import plain_forward
from worker.engine.vllm_engine import VllmEngine

CONTEXT = 256  # of the engine


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("prompt", [1, 2])
def test_the_shortest_requests_are_steered_and_captured_whole(
    engine: VllmEngine, prompt: int, tokens: int
) -> None:
    spec = request(prompt_of(prompt), add(vector(engine)), max_tokens=tokens)
    outcome = run_alone(engine, spec)
    assert rows_of(outcome).shape == (prompt + tokens - 1, WIDTH)
    assert moved(engine, spec) == set(range(prompt + tokens - 1))


def test_a_prompt_of_one_token_is_a_prompt_and_no_generated_text(engine: VllmEngine) -> None:
    in_prompt = add(vector(engine), spans=((0, 1),))
    in_text = add(vector(engine), spans=((1, FOREVER),))
    assert moved(engine, request((9,), in_prompt)) == {0}
    assert moved(engine, request((9,), in_text)) == {1, 2, 3}


@pytest.mark.parametrize("prompt", [1, 200, CONTEXT - 1])
def test_a_request_that_fills_the_context_reaches_its_last_position(
    engine: VllmEngine, prompt: int
) -> None:
    last = add(vector(engine), positions=(CONTEXT - 2,))
    spec = request(prompt_of(prompt), last, max_tokens=CONTEXT - prompt)
    outcome = succeeded(run_alone(engine, spec))
    assert len(outcome.choices[0].token_ids) == CONTEXT - prompt
    assert rows_of(outcome).shape == (CONTEXT - 1, WIDTH)
    assert moved(engine, spec) == {CONTEXT - 2}


def test_a_steered_request_that_a_stop_string_ends_has_a_row_for_all_but_its_last_token(
    engine: VllmEngine,
) -> None:
    drawn = tuple(range(100, 256))
    steer = add(vector(engine), layer=1)
    whole = request(prompt_of(6), steer, max_tokens=8, forced=False, allowed_token_ids=drawn)
    free = succeeded(run_alone(engine, whole))
    words = free.choices[0].text.split()
    stopped = succeeded(
        run_alone(engine, replace(whole, sampling=replace(whole.sampling, stop=(words[3],))))
    )
    count = words.index(words[3]) + 1
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].token_ids == free.choices[0].token_ids[:count]
    assert rows_of(stopped).shape == (6 + count - 1, WIDTH)
    assert np.allclose(rows_of(stopped), rows_of(free)[: 6 + count - 1], atol=SAME)


def test_the_prompt_logprobs_of_a_steered_request_are_those_of_its_steered_prompt(
    engine: VllmEngine, tiny_llama: Path
) -> None:
    """What `echo` shows beside the prompt: position 3 is steered, so position 4 is predicted
    otherwise, and positions before are not."""
    prompt = prompt_of(8)
    steer = add(vector(engine), layer=1, positions=(3,))
    steered, plain = (
        prompt_logprobs(run_alone(engine, request(prompt, *ops, captures=(), prompt_logprobs=0)))
        for ops in ((steer,), ())
    )
    assert np.allclose(steered, expected(tiny_llama, engine, prompt, steer), atol=1e-3)
    assert np.allclose(steered[:3], plain[:3], atol=1e-3)
    assert abs(steered[3] - plain[3]) > 0.01


def test_a_request_of_one_token_beside_long_ones_is_the_one_that_runs_alone(
    engine: VllmEngine,
) -> None:
    short = request((9,), add(vector(engine)), max_tokens=1)
    longer = [request(prompt_of(30, seed=seed), max_tokens=9) for seed in range(5)]
    alone = run_alone(engine, short)
    beside = run_together(engine, [*longer, short])[-1]
    assert tokens_of(beside) == tokens_of(alone) == (FORCED,)
    assert np.allclose(rows_of(beside), rows_of(alone), atol=SAME)


def prompt_logprobs(outcome: object) -> list[float]:
    """Return the log-probability of each prompt token but the first."""
    listed = succeeded(outcome).prompt_logprobs  # type: ignore[arg-type]
    assert listed is not None
    assert listed[0] is None
    return [entry[0].logprob for entry in listed[1:] if entry is not None]


def expected(
    model: Path, engine: VllmEngine, prompt: tuple[int, ...], steer: Intervention
) -> list[float]:
    edit = {
        "layer": steer.layer,
        "rows": numbers_of(engine, steer.vector),
        "scale": steer.scale,
        "positions": steer.positions,
    }
    _, logits = plain_forward.forward(plain_forward.load(model), list(prompt), [edit])
    scores = logits.astype(np.float64)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return [float(scores[at, token]) for at, token in enumerate(prompt[1:])]
