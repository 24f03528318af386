"""What a steered request leaves in the prefix cache is met by its equals alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.completions.salt import salt_for
from app.completions.spec import RequestSpec
from app.steering.spec import FOREVER
from tests.engine.engines import ACCOUNT, run_alone
from tests.engine.watching import watched
from tests.faultlist.asking import SAME, add, prompt_of, request, rows_of, succeeded, vector
from tests.reference import plain_forward
from worker.engine import sampling as engine_sampling
from worker.engine.vllm_engine import VllmEngine

P = 100  # three whole blocks of 32 tokens and a rest


def test_a_plain_request_after_a_steered_one_with_its_prompt_equals_the_reference(
    engine: VllmEngine, tiny_llama: Path
) -> None:
    spec = request(prompt_of(P, seed=1), captures=(), forced=False, logprobs=5)
    steered = replace(spec, interventions=(add(vector(engine), layer=0),))
    run_alone(engine, steered)
    cached, logprobs = answer(engine, spec, salt_for(ACCOUNT, spec))
    assert cached == 0
    assert np.allclose(logprobs, reference(tiny_llama, spec), atol=1e-3)


def test_without_the_salt_a_plain_request_continues_from_steered_blocks(
    engine: VllmEngine, tiny_llama: Path
) -> None:
    spec = request(prompt_of(P, seed=2), captures=(), forced=False, logprobs=5)
    steered = replace(spec, interventions=(add(vector(engine), layer=0),))
    answer(engine, steered, "one for all")
    cached, logprobs = answer(engine, spec, "one for all")
    assert cached == 96
    assert not np.allclose(logprobs, reference(tiny_llama, spec), atol=0.1)


def test_p_is_in_the_salt_unless_an_op_acts_everywhere(engine: VllmEngine) -> None:
    """The same tokens are prompt in one request and generated text in the other."""
    some = add(vector(engine), layer=0, spans=((0, 10),))
    short, long = request(prompt_of(P), some), request(prompt_of(P + 40), some)
    assert salt_for(ACCOUNT, short) != salt_for(ACCOUNT, long)
    everywhere = [replace(spec, interventions=(add("sv_a"),)) for spec in (short, long)]
    assert len({salt_for(ACCOUNT, spec) for spec in everywhere}) == 1


def test_a_capture_after_a_hit_of_its_prompt_has_every_row(engine: VllmEngine) -> None:
    spec = request(prompt_of(P, seed=3))
    first = run_alone(engine, spec)
    run_alone(engine, replace(spec, captures=()))  # its blocks are in the cache now
    with watched(engine) as seen:
        again = run_alone(engine, spec)
    assert seen.cached == [0]
    assert np.allclose(rows_of(again), rows_of(first), atol=SAME)


@pytest.mark.parametrize(("first", "cached"), [(95, 0), (96, 96)])
def test_a_capture_of_the_last_prompt_token_alone_may_read_the_cache(
    engine: VllmEngine, first: int, cached: int
) -> None:
    """Of 97 tokens at most three blocks of 32 come from the cache: position 96 always runs."""
    spec = request(prompt_of(97, seed=first))
    whole = rows_of(run_alone(engine, spec))
    run_alone(engine, replace(spec, captures=()))
    window = (replace(spec.captures[0], spans=((first, FOREVER),)),)
    with watched(engine) as seen:
        outcome = run_alone(engine, replace(spec, captures=window))
    assert seen.cached == [cached]
    assert np.allclose(rows_of(outcome), whole[first:], atol=SAME)


def test_a_capture_that_reads_the_cache_is_short_and_its_request_is_errored(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completeness check stands behind: short rows are never given out as whole ones."""
    spec = request(prompt_of(P, seed=4))
    run_alone(engine, replace(spec, captures=()))
    to_params = engine_sampling.to_params
    monkeypatch.setattr(
        engine_sampling,
        "to_params",
        lambda *args, **kwargs: to_params(*args, **{**kwargs, "skip_cache": False}),
    )
    with watched(engine) as seen:
        outcome = run_alone(engine, spec)
    assert seen.cached == [96]
    assert getattr(outcome, "code", None) == "activation_rows_mismatch"


def answer(engine: VllmEngine, spec: RequestSpec, salt: str) -> tuple[int, list[float]]:
    """Run a request under a salt; return its cached tokens and its tokens' log-probabilities."""
    with watched(engine) as seen:
        outcome = succeeded(asyncio.run(engine.run(f"salted-{salt[:3]}", spec, salt=salt)))
    logprobs = outcome.choices[0].token_logprobs
    assert logprobs is not None
    return seen.cached[0], list(logprobs)


def reference(model: Path, spec: RequestSpec) -> list[float]:
    """Return the log-probabilities of the greedy tokens of an unsteered request."""
    loaded = plain_forward.load(model)
    tokens, found = list(spec.prompt_token_ids), []
    for _ in range(spec.sampling.max_tokens):
        _, logits = plain_forward.forward(loaded, tokens, [])
        last = logits[-1].astype(np.float64)
        found.append(-float(np.log(np.exp(last - last.max()).sum())))
        tokens.append(int(last.argmax()))
    return found
