"""Streams of vLLM with a bfloat16 model whose characters take several tokens: the chunks joined
are the plain answer, captures and all; what stored and copied vectors and bfloat16 captures do.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from openai import OpenAI

from tests.completions_api.byte_model import CIRCLE, HIDDEN, LAYERS, make_byte_llama
from tests.completions_api.served import Served, vllm_serving
from tests.completions_api.streams import Stream, opened, streamed
from tests.fixtures.documented import Described
from tiller.tensors import decode

pytestmark = pytest.mark.timeout(900)  # the worker's start on a busy machine counts

VECTOR = [1.0, 2.0, 3.0, *[0.0] * (HIDDEN - 3)]
STEER = [{"activations": [VECTOR], "layer_indices": [1], "scale": 2}]
PLAIN = {"prompt": "hi ", "temperature": 0, "max_tokens": 12, "return_token_ids": True}


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[Served]:
    """A worker with the model of bytes, and the API beside it."""
    folder = tmp_path_factory.mktemp("streams")
    model = make_byte_llama(folder / "llama")
    with vllm_serving(model, dtype="bfloat16", heartbeat_seconds=0.5) as served:
        yield served


CASES = {
    "plain": {},
    "steered": {"apply_steering_vectors": STEER},
    "read": {"output_residual_stream": True},
    "steered and read": {"apply_steering_vectors": STEER, "output_residual_stream": [1, 2]},
    "captures by name": {
        "captures": [
            {"name": "ends", "layers": [0, 2], "at": {"phase": "last"}},
            {"name": "score", "layers": [3], "reduce": {"project": [VECTOR], "unit": True}},
        ],
    },
    "several choices": {"n": 3, "temperature": 1, "seed": 5},
    "several prompts": {"prompt": ["hi ", "you ", "all of you "], "n": 2, "temperature": 0.8},
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True},
    "echo with logprobs of several choices": {
        "echo": True,
        "logprobs": 2,
        "n": 3,
        "temperature": 1,
        "seed": 7,
    },
    "logprobs of the prompt": {"prompt_logprobs": 2},
    "a stop string": {"stop": ["é 😀é"], "logprobs": 1},
    "a stop string that never comes": {"stop": ["é 😀x", "no"]},
    "a stop token": {"stop_token_ids": [2 + 32]},
    "a warning": {"prompt": "<s>hi "},
    "without ids": {"return_token_ids": False, "max_tokens": 40},
}
LONG = 40  # tokens; a few may all be made between two looks at a busy machine


@pytest.mark.parametrize("name", CASES)
def test_the_chunks_joined_are_the_plain_answer(real, name):
    fields = {**PLAIN, "seed": 1, **CASES[name]}
    plain = real.complete(**fields)
    assert plain.status_code == 200, plain.text
    stream = streamed(
        real, described=Described(real.app), stream_options={"include_usage": True}, **fields
    )
    assert stream.is_done, stream
    left_out = ("id", "object", "created")
    assert stream.joined() == {k: v for k, v in plain.json().items() if k not in left_out}
    if fields.get("max_tokens", 0) >= LONG:
        assert len(stream.choices()) > 2, "it came in pieces"


def test_characters_and_stop_strings_come_whole_or_not_at_all(real):
    stream = streamed(real, **{**PLAIN, "max_tokens": 60, "stop": ["é 😀é 😀z", "\N{WORM}"]})
    assert stream.text() == (CIRCLE * 9)[: len(stream.text())]
    assert len(stream.token_ids()) == 60
    cut = streamed(real, **{**PLAIN, "stop": ["é 😀"]})
    assert cut.text() == "😀"
    assert cut.choices()[-1]["stop_reason"] == "é 😀"


def test_what_was_captured_comes_last_also_without_usage(real):
    stream = streamed(real, **PLAIN, output_residual_stream=[1])
    assert [bool(chunk["choices"]) for chunk in stream.chunks[-2:]] == [True, False]
    assert "usage" not in stream.chunks[-1]
    assert stream.chunks[-1]["activations"]["residual_stream"]["shape"][0] == 1


def test_the_openai_client_reads_a_stream(real):
    key = real.client.headers["authorization"].removeprefix("Bearer ")
    with OpenAI(base_url=f"{real.client.base_url}/v1", api_key=key, max_retries=0) as client:
        chunks = list(
            client.completions.create(
                model="tiny",
                prompt="hi ",
                max_tokens=14,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"output_residual_stream": [1, 0], "apply_steering_vectors": STEER},
            )
        )
        plain = client.completions.create(
            model="tiny",
            prompt="hi ",
            max_tokens=14,
            temperature=0,
            extra_body={"output_residual_stream": [1, 0], "apply_steering_vectors": STEER},
        )
    *pieces, last = chunks
    text = "".join(piece.choices[0].text for piece in pieces)
    assert text == plain.choices[0].text
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage == plain.usage
    read = [decode(each.activations["residual_stream"]) for each in (last, plain)]
    assert read[0].shape == (2, 4 + 14 - 1, HIDDEN)
    assert np.array_equal(read[0], read[1])


def test_bfloat16_captures_travel_as_int16(real):
    tensor = real.complete(**PLAIN, output_residual_stream=[0]).json()["activations"]
    assert tensor["residual_stream"]["dtype"] == "int16"
    assert tensor["residual_stream"]["original_dtype"] == "torch.bfloat16"
    rows = decode(tensor["residual_stream"])
    assert rows.dtype == np.float32
    assert np.isfinite(rows).all()
    assert not (rows.view(np.uint32) & 0xFFFF).any(), "no more bits than bfloat16 has"
    assert 1 < np.abs(rows).max() < 10


def test_a_stored_vector_steers_as_its_numbers_do(real):
    fields = {**PLAIN, "max_tokens": 1, "output_residual_stream": [1]}
    stored = real.client.post("/v1/steering_vectors", json={"activations": [VECTOR]})
    assert stored.status_code in (200, 201), stored.text
    named = {"op": "add", "layers": [1], "vector": stored.json()["id"], "scale": 2}
    read = [
        streamed(real, **fields, **steer).chunks[-1]["activations"]["residual_stream"]
        for steer in (
            {"interventions": [named]},
            {"interventions": [{**named, "vector": VECTOR}]},
            {"apply_steering_vectors": [{"vector": stored.json()["id"], **LAYER_ONE}]},
            {"apply_steering_vectors": STEER},
        )
    ]
    assert read[0] == read[1] == read[2] == read[3]
    plain = real.complete(**fields).json()["activations"]["residual_stream"]
    moved = decode(read[0]) - decode(plain)
    assert np.allclose(moved, 2 * np.array(VECTOR), atol=0.05)


LAYER_ONE = {"layer_indices": [1], "scale": 2}


def test_rows_of_a_finished_job_replace_those_of_a_stream(real):
    request = {"prompt": "me ", "max_tokens": 1, "output_residual_stream": [1]}
    job = real.client.post("/v1/jobs", json={"model": "tiny", "requests": [request]}).json()

    def is_completed() -> bool:
        return real.client.get(f"/v1/jobs/{job['id']}").json()["status"] == "completed"

    real.cluster.wait(is_completed, "the Job to end", 60)
    source = {"job": job["id"], "request_index": 0, "layer": 1, "positions": [1, 2]}
    replace = {
        "op": "replace",
        "layers": [1],
        "from": source,
        "at": {"positions": [1, 2]},
    }
    fields = {**PLAIN, "max_tokens": 1, "output_residual_stream": [1]}
    patched, plain, other = (
        decode(streamed(real, **each).chunks[-1]["activations"]["residual_stream"])[0]
        for each in (
            {**fields, "interventions": [replace]},
            fields,
            {**fields, "prompt": request["prompt"]},
        )
    )
    assert np.array_equal(patched[1:3], other[1:3])
    assert np.array_equal(patched[[0, 3]], plain[[0, 3]])
    assert not np.array_equal(plain[1:3], other[1:3])


def test_numbers_that_are_not_finite_are_refused_before_the_stream(real):
    before = real.balance()
    huge = [{"activations": [[3e38] * HIDDEN], "layer_indices": [1]}]
    stream = streamed(real, **PLAIN, apply_steering_vectors=[*huge, *huge])
    assert (stream.status, stream.error["error"]["code"]) == (400, "non_finite_activations")
    assert real.balance() == before


def test_a_client_that_leaves_stops_the_engine_and_pays_what_was_made(real):
    before, read = real.balance(), 0
    fields = {"prompt": "hi ", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
    with opened(real, Stream(), **fields) as answer:
        lines = answer.iter_lines()
        while read < 3:
            read += "choices" in next(lines)
    real.wait_state("cancelled", 2.0)
    (row,) = real.cluster.rows(
        "SELECT tokens_charged AS charged FROM completions ORDER BY id DESC LIMIT 1"
    )
    assert 4 + read <= row["charged"] < 4 + 1000
    assert real.balance() == (before[0] - row["charged"], 0)

    def in_flight() -> int:
        (worker,) = real.cluster.rows("SELECT requests_running FROM workers WHERE state = 'ready'")
        return int(worker["requests_running"])

    real.cluster.wait(lambda: in_flight() == 0, "its place in the engine", 2.0)


def test_all_layers_are_read_while_others_are_streamed(real):
    stream = Stream()
    with opened(real, stream, **{**PLAIN, "max_tokens": 200}) as answer:
        lines = answer.iter_lines()
        stream.take(next(lines))
        read = real.complete(**PLAIN, output_residual_stream=True)
        for line in lines:
            stream.take(line)
    assert stream.is_done
    assert decode(read.json()["activations"]["residual_stream"]).shape[0] == LAYERS
    assert len(stream.token_ids()) == 200
