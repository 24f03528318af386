"""Everything that the API refuses, through the openai SDK: told by name, and nothing has changed.

No worker runs here: what is refused never needs one, and what is taken ends as 503 `no_worker`.
"""

import itertools
import re
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.fixtures.api import Api
from tests.seed_contract.refused import GOOD, PARAMS, PLAIN, ROW, RULES, TAKEN, steer
from tests.seed_contract.unchanged import everything

STEERING = "apply_steering_vectors"
SUBSETS = [names for size in (1, 2, 3, 4) for names in itertools.combinations(PARAMS, size)]
CASES = [(rule, name) for rule, cases in RULES.items() for name in cases]
# The first rule is about the whole list and has a test of its own. Of every other rule the first
# case is broken together with that of another, or this one where that needs a list of its own.
ORDERED = list(itertools.combinations([rule for rule in RULES if rule != "the list"], 2))
TOGETHER = {"size": "2,097,184 encoded numbers"}


def refusal(sdk: OpenAI, api: Api, body: dict[str, Any]) -> openai.APIStatusError:
    """Send a body that must be refused; check that all of Postgres stayed as it was."""
    before = everything(api.database)
    with pytest.raises(openai.APIStatusError) as refused:
        sdk.completions.create(model="tiny", prompt="", extra_body={**PLAIN, **body})
    assert everything(api.database) == before
    error = refused.value
    envelope = error.response.json()
    assert set(envelope) == {"error", "request_id"}
    assert re.fullmatch(r"req_[0-9a-f]{32}", envelope["request_id"])
    assert error.response.headers["x-request-id"] == envelope["request_id"]
    return error


def refused_by_name(sdk: OpenAI, api: Api, body: dict[str, Any], *, param: str) -> str:
    """Check that a body is an invalid request on account of `param`; give the message."""
    error = refusal(sdk, api, body)
    told = error.response.json()["error"]
    message: str = told.pop("message")
    assert isinstance(error, openai.BadRequestError), message
    assert error.status_code == 400
    assert told == {"type": "invalid_request_error", "param": param, "code": "invalid_request"}
    assert len(message) < 600
    assert message.endswith((".", "?"))
    return message


@pytest.mark.parametrize(("rule", "name"), CASES)
def test_each_rule_of_steering_vectors_is_told(
    strict_sdk: OpenAI, shared_api: Api, rule: str, name: str
) -> None:
    vectors, says = RULES[rule][name]
    message = refused_by_name(strict_sdk, shared_api, {STEERING: vectors}, param=STEERING)
    for part in says:
        assert part in message, message
    assert message.startswith(STEERING)


@pytest.mark.parametrize("name", TAKEN)
def test_what_keeps_every_rule_lacks_only_a_worker(
    strict_sdk: OpenAI, shared_api: Api, name: str
) -> None:
    error = refusal(strict_sdk, shared_api, TAKEN[name])
    assert isinstance(error, openai.InternalServerError)
    assert (error.status_code, error.code) == (503, "no_worker")
    assert int(error.response.headers["retry-after"]) > 0


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
@pytest.mark.parametrize(
    ("several", "says"),
    [
        ({"n": 2}, "n is 2"),
        ({"n": 0}, "n is 0"),
        ({"prompt": [[2, 3], [4, 5]]}, "one prompt, but 2 were sent"),
        ({"prompt": ["hi", "he", "ho"]}, "one prompt, but 3 were sent"),
    ],
    ids=["n", "no n", "prompts", "texts"],
)
def test_n_and_several_prompts_name_the_first_field_that_reads_or_writes(
    strict_sdk: OpenAI,
    shared_api: Api,
    names: tuple[str, ...],
    several: dict[str, Any],
    says: str,
) -> None:
    body = {**several, **{name: GOOD[name] for name in reversed(names)}}
    message = refused_by_name(strict_sdk, shared_api, body, param=names[0])
    assert says in message
    assert names[0] in message


@pytest.mark.parametrize("n", [-1, 129, 2**70, 1.0, 1.5, True, False, "1", [1], {}])
def test_whatever_is_wrong_with_n_beside_a_steer_is_told_of_the_steer(
    strict_sdk: OpenAI, shared_api: Api, n: Any
) -> None:
    body = {"n": n, STEERING: GOOD[STEERING]}
    message = refused_by_name(strict_sdk, shared_api, body, param=STEERING)
    assert "Send n: 1." in message
    message = refused_by_name(strict_sdk, shared_api, {"n": n, STEERING: []}, param=STEERING)
    assert "is empty" in message
    message = refused_by_name(strict_sdk, shared_api, {"n": n}, param="n")
    assert "whole number from 1 to" in message


@pytest.mark.parametrize("rule", RULES)
def test_a_stream_is_refused_as_a_plain_request_is(
    strict_sdk: OpenAI, shared_api: Api, rule: str
) -> None:
    vectors, says = next(iter(RULES[rule].values()))
    body = {STEERING: vectors, "stream": True, "output_residual_stream": [1]}
    message = refused_by_name(strict_sdk, shared_api, body, param=STEERING)
    for part in says:
        assert part in message, message


@pytest.mark.parametrize("rules", ORDERED, ids=" before ".join)
def test_of_two_broken_rules_the_first_is_named(
    strict_sdk: OpenAI, shared_api: Api, rules: tuple[str, str]
) -> None:
    first, second = (RULES[rule][TOGETHER.get(rule) or next(iter(RULES[rule]))] for rule in rules)
    # The vector that breaks the later rule comes first, so its place does not decide.
    body = {STEERING: [*second[0], *first[0]]}
    message = refused_by_name(strict_sdk, shared_api, body, param=STEERING)
    assert first[1][-1] in message, message


def test_an_empty_list_comes_before_n_and_n_before_everything_else(
    strict_sdk: OpenAI, shared_api: Api
) -> None:
    message = refused_by_name(strict_sdk, shared_api, {STEERING: [], "n": 2}, param=STEERING)
    assert "is empty" in message
    empty = {STEERING: [], "n": 2, "prompt": ["a", "b"], "output_residual_stream": [1]}
    message = refused_by_name(strict_sdk, shared_api, empty, param=STEERING)
    assert "is empty" in message, "only n and the prompts name the read"
    nine = [steer(scael=1)] * 9
    message = refused_by_name(strict_sdk, shared_api, {STEERING: nine, "n": 2}, param=STEERING)
    assert "n is 2" in message


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([1, 1], ("layer 1", "more than once")),
        ([-1], ("layer -1", "0 to 3")),
        ([4], ("layer 4", "0 to 3")),
        ([1.5], ("[1.5]", "true for all")),
        ([], ("no layer", "true for all")),
        ("all", ('"all"', "true for all")),
    ],
)
def test_a_read_of_layers_that_are_not_there_is_refused(
    strict_sdk: OpenAI, shared_api: Api, layers: Any, says: tuple[str, ...]
) -> None:
    name = "output_residual_stream"
    message = refused_by_name(strict_sdk, shared_api, {name: layers}, param=name)
    for part in says:
        assert part in message, message


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("apply_steering_vector", STEERING),
        ("output_residual_streams", "output_residual_stream"),
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("top_logprobs", "logprobs"),
        ("max_completion_tokens", "max_tokens"),
        ("messages", "prompt"),
        ("steering_vectors", STEERING),
    ],
)
def test_a_near_miss_of_a_field_is_named(
    strict_sdk: OpenAI, shared_api: Api, sent: str, meant: str
) -> None:
    message = refused_by_name(strict_sdk, shared_api, {sent: 1}, param=sent)
    assert repr(sent) in message
    assert f"Did you mean {meant!r}?" in message


@pytest.mark.parametrize("prompts", [["a"] * 257, [0.5] * 100_000, [[2]] * 100_000])
def test_more_prompts_than_may_be_sent_are_not_looked_at_one_by_one(
    strict_sdk: OpenAI, shared_api: Api, prompts: list[Any]
) -> None:
    body = {"prompt": prompts, STEERING: GOOD[STEERING]}
    message = refused_by_name(strict_sdk, shared_api, body, param="prompt")
    assert f"{len(prompts)} prompts were sent; at most 256" in message


def test_of_many_bad_prompts_the_first_is_told(strict_sdk: OpenAI, shared_api: Api) -> None:
    body = {"prompt": ["good", 0.5, *[None] * 200]}
    message = refused_by_name(strict_sdk, shared_api, body, param="prompt")
    assert "not 0.5" in message


def test_the_tokens_of_a_text_are_counted_with_bos(strict_sdk: OpenAI, shared_api: Api) -> None:
    out = [steer(activations=[[ROW]], position_indices=[4])]
    body = {"prompt": "hi", STEERING: out}
    message = refused_by_name(strict_sdk, shared_api, body, param=STEERING)
    assert "3 tokens" in message
    error = refusal(strict_sdk, shared_api, {**body, "prompt": "him"})
    assert error.code == "no_worker"
    message = refused_by_name(
        strict_sdk,
        shared_api,
        {**body, "prompt": "him", "add_special_tokens": False},
        param=STEERING,
    )
    assert "3 tokens" in message


def test_the_last_position_of_the_context_is_never_reached(
    strict_sdk: OpenAI, shared_api: Api
) -> None:
    full = {"prompt": [2] * 4, "max_tokens": 60}
    last = [steer(activations=[[ROW]], position_indices=[63])]
    message = refused_by_name(strict_sdk, shared_api, {**full, STEERING: last}, param=STEERING)
    assert "0 to 62" in message
    assert "raise max_tokens" not in message, "the context ends there"
    before = [steer(activations=[[ROW]], position_indices=[62])]
    assert refusal(strict_sdk, shared_api, {**full, STEERING: before}).code == "no_worker"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": 62}, "max_tokens", "context_length_exceeded"),
        ({"prompt": [2] * 64}, "prompt", "context_length_exceeded"),
        ({"logprobs": 101}, "logprobs", "invalid_request"),
        ({"temperature": 100.5}, "temperature", "invalid_request"),
        ({"stream": "yes"}, "stream", "invalid_request"),
        ({STEERING: [steer(activations=None, vector="sv_0")]}, STEERING, "invalid_request"),
    ],
)
def test_what_else_a_body_may_not_say_changes_nothing_either(
    strict_sdk: OpenAI, shared_api: Api, fields: dict[str, Any], param: str, code: str
) -> None:
    told = refusal(strict_sdk, shared_api, {STEERING: GOOD[STEERING], **fields})
    assert isinstance(told, openai.BadRequestError)
    assert (told.type, told.param, told.code) == ("invalid_request_error", param, code)


def test_another_model_is_not_found(strict_sdk: OpenAI, shared_api: Api) -> None:
    told = refusal(strict_sdk, shared_api, {"model": "llama-8b"})
    assert isinstance(told, openai.NotFoundError)
    assert (told.type, told.code) == ("invalid_request_error", "model_not_found")


@pytest.mark.parametrize(
    ("key", "error", "code"),
    [
        ("sk_live_wrong", openai.AuthenticationError, "invalid_api_key"),
        ("", openai.AuthenticationError, "invalid_api_key"),
        (frozenset({"jobs:read"}), openai.PermissionDeniedError, "insufficient_scope"),
    ],
    ids=["unknown", "empty", "without the scope"],
)
def test_who_may_not_ask_is_told_before_the_body_is_looked_at(
    strict_sdk: OpenAI,
    shared_api: Api,
    key: str | frozenset[str],
    error: type[openai.APIStatusError],
    code: str,
) -> None:
    secret = key if isinstance(key, str) else shared_api.as_other(scopes=key)
    other = strict_sdk.with_options(default_headers={"authorization": f"Bearer {secret}"})
    told = refusal(other, shared_api, {STEERING: []})
    assert isinstance(told, error)
    assert told.code == code


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_that_json_does_not_have_are_bad_json(shared_api: Api, number: str) -> None:
    row = f"[{number}, 0, 0, 0, 0, 0, 0, 0]"
    body = (
        '{"model": "tiny", "prompt": "hi", "apply_steering_vectors": '
        f'[{{"activations": [{row}], "layer_indices": [1]}}]}}'
    )
    before = everything(shared_api.database)
    answer = shared_api.client.post("/v1/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_json")
    assert everything(shared_api.database) == before
