"""Streams through the openai SDK, steered, read or neither: they say what plain answers say."""

from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from tests.seed_contract.asking import (
    LAYER,
    MODEL,
    NEEDS_SERVICE,
    PROMPT,
    ask,
    residual_stream,
    steering,
)
from tests.stack.waiting import wait_for

pytestmark = NEEDS_SERVICE

READ = {"output_residual_stream": [LAYER - 1, LAYER]}
STEERED = {"apply_steering_vectors": steering(scale=4)}
CAPTURED = {"captures": [{"name": "norms", "layers": [LAYER], "reduce": "norm"}]}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "steered": STEERED,
    "read": READ,
    "steered and read": {**STEERED, **READ},
    "steered, read and captured": {**STEERED, **READ, **CAPTURED},
}


def stream(sdk: OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> list[Any]:
    """Ask as `ask` does and give all chunks."""
    usage = {"include_usage": True}
    with ask(sdk, extra, stream=True, stream_options=usage, **fields) as chunks:
        return list(chunks)


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_says_what_the_plain_answer_says(sdk: OpenAI, kind: str) -> None:
    plain = ask(sdk, KINDS[kind], max_tokens=10)
    chunks = stream(sdk, KINDS[kind], max_tokens=10)
    assert text_of(chunks) == plain.choices[0].text
    *earlier, last = chunks
    assert len(earlier) > 1, "it came in pieces"
    assert {chunk.id for chunk in chunks} == {last.id}
    assert last.choices == []
    assert last.usage == plain.usage
    assert all(chunk.usage is None for chunk in earlier)
    reasons = [c.finish_reason for chunk in earlier for c in chunk.choices]
    assert [reason for reason in reasons if reason] == ["length"]
    assert not any(hasattr(chunk, "activations") for chunk in earlier)
    assert getattr(last, "activations", None) == getattr(plain, "activations", None)
    if "read" in kind:
        shape = (2, plain.usage.total_tokens - 1)
        assert residual_stream(last).shape[:2] == shape


def test_a_steer_is_seen_in_the_read_of_a_stream(sdk: OpenAI) -> None:
    rows = []
    for scale in (0, 2):
        extra = {**READ, "apply_steering_vectors": steering(scale=scale)}
        rows.append(residual_stream(stream(sdk, extra)[-1]))
    assert np.array_equal(rows[0][0], rows[1][0])
    assert (rows[0][1] != rows[1][1]).any(axis=-1).all()


def test_several_choices_stream_side_by_side(sdk: OpenAI) -> None:
    fields = {"prompt": [PROMPT, "In the garden", "Seven times seven is"], "max_tokens": 6}
    plain = ask(sdk, **fields)
    chunks = stream(sdk, **fields)
    for choice in plain.choices:
        assert text_of(chunks, choice.index) == choice.text
    assert chunks[-1].usage == plain.usage
    sampled = stream(sdk, {"ignore_eos": True}, n=2, seed=5, temperature=1.0, max_tokens=6)
    assert text_of(sampled, 0)
    assert text_of(sampled, 1)
    assert sampled[-1].usage.completion_tokens == 12


def test_logprobs_of_the_chunks_joined_are_those_of_the_plain_answer(sdk: OpenAI) -> None:
    plain = ask(sdk, max_tokens=5, logprobs=2).choices[0].logprobs
    chunks = stream(sdk, max_tokens=5, logprobs=2)
    parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs]
    assert [token for part in parts for token in part.tokens] == plain.tokens
    assert [place for part in parts for place in part.text_offset] == plain.text_offset
    values = [value for part in parts for value in part.token_logprobs]
    assert np.allclose(values, plain.token_logprobs, atol=0.02)


def test_a_stream_without_usage_has_none(sdk: OpenAI) -> None:
    with ask(sdk, stream=True, max_tokens=3) as chunks:
        found = list(chunks)
    assert all(chunk.usage is None for chunk in found)
    assert found[-1].choices[0].finish_reason == "length"


def test_a_bad_body_is_refused_before_a_stream_begins(sdk: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        stream(sdk, {"apply_steering_vectors": steering(layer_indices=[30])})
    assert refused.value.param == "apply_steering_vectors"


def test_a_client_that_leaves_pays_for_the_prompt_and_what_was_made(
    sdk: OpenAI, http: httpx.Client
) -> None:
    before = http.get("/usage").json()["balance"]
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2000, "temperature": 0}
    body = {**asked, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        next(answer.iter_lines())
    wait_for(lambda: http.get("/usage").json()["held"] == 0, "the end of the Completion")
    charged = before - http.get("/usage").json()["balance"]
    prompt = ask(sdk).usage.prompt_tokens
    assert prompt < charged < prompt + 1000, "the prompt, and what was made until it left"
