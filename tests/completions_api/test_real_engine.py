"""Completions with vLLM and steering in a worker of its own: what the fields do and give."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.completions_api.served import Served, vllm_serving
from tests.engine.tiny_model import make_tiny_llama
from tiller.tensors import decode, encode

pytestmark = pytest.mark.timeout(900)  # the worker's start on a busy machine counts

HIDDEN, LAYERS, VOCAB = 64, 4, 256
PROMPT = [0, 17, 40, 93]


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[Served]:
    """A worker with a tiny model in float32, a small batch, and the API beside it."""
    folder = tmp_path_factory.mktemp("completions")
    model = make_tiny_llama(folder / "llama", layers=LAYERS, hidden=HIDDEN, vocab=VOCAB)
    with vllm_serving(model, dtype="float32", heartbeat_seconds=1) as served:
        yield served


def complete(real: Served, **fields):
    answer = real.complete(**{"prompt": PROMPT, "temperature": 0, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream_of(answer):
    return decode(answer["activations"]["residual_stream"])


def steer(scale, vector, **fields):
    return [{"activations": [vector], "layer_indices": [1], "scale": scale, **fields}]


VECTOR = [1.0, 2.0, 3.0, *[0.0] * (HIDDEN - 3)]


def test_steer_and_read_in_one_request(real):
    plain = complete(real, output_residual_stream=[0, 1], max_tokens=1)
    assert list(plain["activations"]) == ["residual_stream"]
    assert set(plain["activations"]["residual_stream"]) == {
        *("data", "dtype", "original_dtype", "shape", "compression"),
    }
    read = complete(
        real,
        output_residual_stream=[1, 0],
        apply_steering_vectors=steer(2, VECTOR),
        max_tokens=1,
    )
    zero = complete(
        real,
        output_residual_stream=[0, 1],
        apply_steering_vectors=steer(0, VECTOR),
        max_tokens=1,
    )
    assert np.array_equal(stream_of(zero), stream_of(plain)), "scale 0 changes nothing"
    moved = stream_of(read) - stream_of(plain)
    assert moved.shape == (2, len(PROMPT), HIDDEN)
    assert not moved[0].any(), "layers ascend, and Layer 0 comes before the steer"
    assert np.allclose(moved[1], 2 * np.array(VECTOR), atol=1e-4)


def test_rows_are_those_of_positions_that_ran(real):
    answer = complete(real, output_residual_stream=True, ignore_eos=True, max_tokens=3)
    assert stream_of(answer).shape == (LAYERS, len(PROMPT) + 2, HIDDEN)


def test_one_position_is_steered_alone_and_encoded_vectors_equal_numbers(real):
    fields = {"output_residual_stream": [1], "max_tokens": 1}
    plain = stream_of(complete(real, **fields))
    numbers = steer(2, [VECTOR], position_indices=[2])
    encoded = [{**numbers[0], "activations": encode([[VECTOR]])}]
    moved = [
        stream_of(complete(real, **fields, apply_steering_vectors=vectors)) - plain
        for vectors in (numbers, encoded)
    ]
    assert np.array_equal(moved[0], moved[1])
    assert [bool(row.any()) for row in moved[0][0]] == [False, False, True, False]


def test_captures_have_names_layers_and_positions(real):
    answer = complete(
        real,
        captures=[{"name": "ends", "layers": [2, 0], "at": {"phase": "last"}}],
        ignore_eos=True,
    )
    ends = answer["activations"]["captures"]["ends"]
    assert ends["layers"] == [0, 2]
    assert ends["positions"] == [3, 4]
    assert decode(ends).shape == (2, 2, HIDDEN)
    whole = complete(real, output_residual_stream=[2], ignore_eos=True)
    assert np.allclose(decode(ends)[1], stream_of(whole)[0, 3:], atol=1e-5)


def test_n_gives_that_many_choices_and_a_seed_repeats_them(real):
    fields = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 6, "return_token_ids": True}
    first, again = complete(real, **fields), complete(real, **fields)
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert first["choices"] == again["choices"]
    assert len({tuple(choice["token_ids"]) for choice in first["choices"]}) > 1
    several = complete(real, prompt=[PROMPT, PROMPT[:2]], **{**fields, "n": 2})
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in several["choices"]] == [
        *[PROMPT] * 2,
        *[PROMPT[:2]] * 2,
    ]


def test_logprobs_and_echo_come_in_openais_shape(real):
    answer = complete(real, prompt="w17 w40", logprobs=2, echo=True, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["text"].startswith("w17 w40")
    logprobs = choice["logprobs"]
    count = answer["usage"]["total_tokens"]
    assert {len(column) for column in logprobs.values()} == {count}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for token, value, top in list(
        zip(
            logprobs["tokens"],
            logprobs["token_logprobs"],
            logprobs["top_logprobs"],
            strict=True,
        )
    )[1:]:
        assert top[token] == value
        assert 2 <= len(top) <= 3
    bare = complete(real, prompt="w17 w40", logprobs=0)["choices"][0]["logprobs"]
    assert bare["tokens"] == logprobs["tokens"][3:]
    assert np.allclose(bare["token_logprobs"], logprobs["token_logprobs"][3:], atol=1e-4)


def test_a_double_bos_is_warned_of(real):
    assert complete(real, prompt="<s> w17")["warnings"] == ["double_bos"]
    assert "warnings" not in complete(real, prompt="w17")


def test_a_completion_goes_before_the_requests_of_a_job_that_wait(real):
    key = real.client.headers["authorization"]
    requests = [{"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}] * 30
    job = real.client.post(
        "/v1/jobs", json={"model": "tiny", "requests": requests}, headers={"authorization": key}
    ).json()

    def done() -> int:
        return real.client.get(f"/v1/jobs/{job['id']}").json()["request_counts"]["succeeded"]

    real.cluster.wait_busy()
    complete(real)
    assert done() < len(requests), "the Completion did not wait for the Job"

    def ended() -> bool:
        return real.client.get(f"/v1/jobs/{job['id']}").json()["status"] == "completed"

    real.cluster.wait(ended, "the Job to end", 120)
