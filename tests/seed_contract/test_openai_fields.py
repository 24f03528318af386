"""The fields that every program for /v1/completions uses, through the openai SDK."""

import httpx
import openai
import pytest
from openai import OpenAI

from tests.seed_contract.asking import (
    CONTEXT,
    HIDDEN,
    MODEL,
    N_LAYERS,
    NEEDS_SERVICE,
    PROMPT,
    ask,
    steering,
)

pytestmark = NEEDS_SERVICE


@pytest.fixture(scope="module")
def token_ids(http: httpx.Client) -> list[int]:
    """PROMPT as the model's tokenizer counts it."""
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": PROMPT})
    return answer.json()["token_ids"]


def test_models_are_listed_with_what_a_program_must_know(sdk: OpenAI):
    (model,) = sdk.models.list().data
    assert model.id == MODEL
    assert sdk.models.retrieve(MODEL).capabilities == model.capabilities
    known = {"hidden_size": HIDDEN, "n_layers": N_LAYERS, "max_model_len": CONTEXT}
    assert known.items() <= model.capabilities.items()
    with pytest.raises(openai.NotFoundError) as refused:
        sdk.models.retrieve("another")
    assert refused.value.code == "model_not_found"


def test_an_answer_has_the_parts_that_programs_read(sdk: OpenAI, token_ids: list[int]):
    completion = ask(sdk, max_tokens=5)
    assert completion.object == "text_completion"
    assert completion.id.startswith("cmpl-")
    assert completion.model == MODEL
    (choice,) = completion.choices
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert choice.text
    assert completion.usage.prompt_tokens == len(token_ids)
    assert completion.usage.completion_tokens == 5
    assert completion.usage.total_tokens == len(token_ids) + 5
    assert completion._request_id.startswith("req_")
    assert not hasattr(completion, "activations"), "nothing was asked for"


def test_a_completion_costs_what_it_used(sdk: OpenAI, http: httpx.Client):
    before = http.get("/usage").json()
    completion = ask(sdk, {"ignore_eos": True}, max_tokens=7)
    after = http.get("/usage").json()
    assert before["balance"] - after["balance"] == completion.usage.total_tokens
    assert after["held"] == 0


def test_token_ids_are_a_prompt_as_good_as_text(sdk: OpenAI, token_ids: list[int]):
    text, ids = ask(sdk, max_tokens=8), ask(sdk, max_tokens=8, prompt=token_ids)
    assert text.choices[0].text == ids.choices[0].text
    assert text.usage == ids.usage


def test_several_prompts_and_n_give_choices_prompt_by_prompt(sdk: OpenAI):
    prompts = [PROMPT, "Seven times seven is", "In the garden"]
    several = ask(sdk, prompt=prompts, max_tokens=4)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.text for choice in several.choices}) == 3
    sampled = {"n": 2, "max_tokens": 4, "temperature": 1, "seed": 3}
    twice = ask(sdk, {"ignore_eos": True}, prompt=prompts[:2], **sampled)
    assert [choice.index for choice in twice.choices] == [0, 1, 2, 3]
    assert twice.usage.completion_tokens == 16


def test_a_seed_repeats_a_sample_and_choice_i_draws_with_seed_plus_i(sdk: OpenAI):
    # Few tokens: beside another choice the numbers are added up in another order.
    fields = {"max_tokens": 5, "temperature": 1.0}
    first = ask(sdk, seed=11, **fields).choices[0].text
    assert ask(sdk, seed=11, **fields).choices[0].text == first
    assert ask(sdk, seed=12, **fields).choices[0].text != first
    both = ask(sdk, seed=11, n=2, **fields)
    assert both.choices[0].text == first
    assert both.choices[1].text != first


def test_a_stop_text_ends_the_text_before_it(sdk: OpenAI):
    whole = ask(sdk, max_tokens=10).choices[0]
    word = whole.text.split()[2]
    cut = ask(sdk, max_tokens=10, stop=[word]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(word)]


def test_logprobs_have_openais_four_lists(sdk: OpenAI):
    completion = ask(sdk, max_tokens=4, logprobs=3)
    logprobs = completion.choices[0].logprobs
    assert len(logprobs.tokens) == 4
    assert "".join(logprobs.tokens) == completion.choices[0].text
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3, "greedy, so the token is among them"
        assert top[token] == value == max(top.values())
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])


def test_echo_puts_the_prompt_before_the_text_with_its_logprobs(sdk: OpenAI, token_ids: list[int]):
    plain = ask(sdk, max_tokens=3).choices[0].text
    echoed = ask(sdk, max_tokens=3, echo=True, logprobs=1).choices[0]
    assert echoed.text == PROMPT + plain
    assert len(echoed.logprobs.tokens) == len(token_ids) + 3
    assert echoed.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in echoed.logprobs.token_logprobs[1:])


def test_a_ban_by_logit_bias_holds(sdk: OpenAI):
    first = ask(sdk, {"return_token_ids": True})
    (banned,) = first.choices[0].token_ids
    other = ask(sdk, {"return_token_ids": True}, logit_bias={str(banned): -100}, max_tokens=4)
    assert banned not in other.choices[0].token_ids


def test_an_idempotency_key_is_not_looked_at(sdk: OpenAI):
    headers = {"Idempotency-Key": "the same"}
    for tokens in (1, 2):
        completion = ask(sdk, {"ignore_eos": True}, max_tokens=tokens, extra_headers=headers)
        assert completion.usage.completion_tokens == tokens


def test_max_tokens_left_out_is_16(sdk: OpenAI):
    completion = sdk.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert completion.usage.completion_tokens == 16


def test_refusals_are_the_sdks_own_exceptions(sdk: OpenAI, credentials: dict[str, str]):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(sdk, {"apply_steering_vectors": steering(layer_indices=[N_LAYERS])})
    error = refused.value
    assert (error.status_code, error.type) == (400, "invalid_request_error")
    assert (error.param, error.code) == ("apply_steering_vectors", "invalid_request")
    assert error.request_id == error.response.json()["request_id"]
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(sdk, model="llama-8b")
    assert unknown.value.code == "model_not_found"
    with (
        OpenAI(base_url=credentials["api_base"], api_key="sk_live_wrong", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError) as unnamed,
    ):
        ask(other)
    assert unnamed.value.status_code == 401
    with pytest.raises(openai.BadRequestError) as too_long:
        ask(sdk, max_tokens=CONTEXT)
    assert too_long.value.code == "context_length_exceeded"


def test_a_position_out_of_reach_is_refused_with_what_to_do(sdk: OpenAI, token_ids: list[int]):
    vectors = steering(activations=[[[0.0] * HIDDEN]], position_indices=[5])
    with pytest.raises(openai.BadRequestError) as refused:
        ask(sdk, {"apply_steering_vectors": vectors}, prompt=token_ids[:4], max_tokens=2)
    body = refused.value.response.json()
    assert set(body) == {"error", "request_id"}
    message = body["error"].pop("message")
    assert body["error"] == {
        "type": "invalid_request_error",
        "param": "apply_steering_vectors",
        "code": "invalid_request",
    }
    for part in ("position 5", "0 to 4", "4 tokens", "max_tokens is 2", "up to 4", "raise max"):
        assert part in message
