"""Every refusal is told before a token is held: status, type, param, code, and nothing stored."""

import pytest

from app.kit.ids import new_uuid
from tests.fixtures.tiny_model import CONTEXT, HIDDEN_SIZE, VOCAB_SIZE

PLAIN = {"model": "tiny", "prompt": [2, 3, 4], "max_tokens": 2}
ROW = [0.0] * HIDDEN_SIZE
STEER = {"activations": [ROW], "layer_indices": [1]}


def steered(**fields):
    return {"apply_steering_vectors": [{**STEER, **fields}]}


REFUSED = {
    "no model": ({"model": None}, "model", "invalid_request"),
    "a model that is no text": ({"model": 1}, "model", "invalid_request"),
    "no prompt": ({"prompt": None}, "prompt", "invalid_request"),
    "an empty prompt": ({"prompt": []}, "prompt", "invalid_request"),
    "one bad prompt of several": ({"prompt": [[2], [VOCAB_SIZE]]}, "prompt", "invalid_request"),
    "too many choices": ({"prompt": [[2]] * 65, "n": 2}, "prompt", "invalid_request"),
    "an unknown field": ({"best_of": 2}, "best_of", "invalid_request"),
    "a temperature that is text": ({"temperature": "1"}, "temperature", "invalid_request"),
    "a context too long": ({"max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
    "one long prompt of several": (
        {"prompt": [[2], [2] * CONTEXT]},
        "prompt",
        "context_length_exceeded",
    ),
    "stream that is no flag": ({"stream": 1}, "stream", "invalid_request"),
    "stream_options alone": ({"stream_options": {}}, "stream_options", "invalid_request"),
    "no vectors": (
        {"apply_steering_vectors": []},
        "apply_steering_vectors",
        "invalid_request",
    ),
    "n with vectors": ({**steered(), "n": 2}, "apply_steering_vectors", "invalid_request"),
    "several prompts with vectors": (
        {**steered(), "prompt": [[2], [3]]},
        "apply_steering_vectors",
        "invalid_request",
    ),
    "several prompts with vectors and captures": (
        {**steered(), "prompt": [[2], [3]], "output_residual_stream": [1]},
        "output_residual_stream",
        "invalid_request",
    ),
    "a layer too many": (
        steered(layer_indices=[1, 2]),
        "apply_steering_vectors",
        "invalid_request",
    ),
    "a misspelt field": (steered(scael=2), "apply_steering_vectors", "invalid_request"),
    "a position out of reach": (
        steered(activations=[[ROW]], position_indices=[4]),
        "apply_steering_vectors",
        "invalid_request",
    ),
    "a layer that does not exist": (
        {"output_residual_stream": [4]},
        "output_residual_stream",
        "invalid_request",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_body_is_refused_by_name(api, name):
    fields, param, code = REFUSED[name]
    before = api.numbers()
    answer = api.client.post("/v1/completions", json={**PLAIN, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert api.numbers() == before


def test_the_reach_error_names_position_reach_and_what_to_do(api):
    body = {**PLAIN, **steered(activations=[[ROW]], position_indices=[4])}
    message = api.client.post("/v1/completions", json=body).json()["error"]["message"]
    for part in ("position 4", "0 to 3", "3 tokens", "max_tokens is 2", "raise"):
        assert part in message


def test_an_unknown_model_is_404_and_a_missing_key_401(api):
    answer = api.client.post("/v1/completions", json={**PLAIN, "model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = api.client.post("/v1/completions", json=PLAIN, headers={"authorization": "Bearer x"})
    assert answer.status_code == 401


def test_a_key_without_the_scope_is_403(api):
    key = api.as_other(scopes=frozenset({"jobs:read"}))
    headers = {"authorization": f"Bearer {key}"}
    answer = api.client.post("/v1/completions", json=PLAIN, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")


def test_a_body_that_is_no_object_is_bad_json(api):
    answer = api.client.post("/v1/completions", content=b"[1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_json")


def test_a_body_is_not_read_before_there_is_a_place_for_it(api):
    places = api.client.app.state.places
    others = [new_uuid() for _ in range(api.client.app.state.settings.limits.completions_waiting)]
    packed = {"content": b"{}", "headers": {"content-encoding": "gzip"}}
    for other in others:
        places.take(other, other)
    answer = api.client.post("/v1/completions", **packed)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    for other in others:
        places.give_back(other, other)
    assert api.client.post("/v1/completions", **packed).status_code == 400


def test_without_a_worker_nothing_is_stored(api):
    before = api.numbers()
    answer = api.client.post("/v1/completions", json={**PLAIN, **steered()})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
    assert api.numbers() == before
