"""Steer and read in one request: which rows move, by how much, and what every form of a vector is.

The baseline is always the same request with scale 0.
"""

from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from tests.seed_contract.asking import (
    HIDDEN,
    LAYER,
    MODEL,
    NEEDS_SERVICE,
    VECTOR,
    Rows,
    a_vector,
    ask,
    assert_moved_by,
    pack,
    residual_stream,
    steering,
)
from tests.seed_contract.vllm_lens_vectors import serialized
from tiller import decode, encode

pytestmark = NEEDS_SERVICE

BELOW_AND_AT = [LAYER - 1, LAYER]


def read(sdk: OpenAI, vectors: list[dict[str, Any]], layers: Any = None, **fields: Any) -> Rows:
    """Read Layers below and at the steer, in one steered request."""
    asked = BELOW_AND_AT if layers is None else layers
    extra = {"output_residual_stream": asked, "apply_steering_vectors": vectors}
    return residual_stream(ask(sdk, extra, **fields))


@pytest.fixture(scope="module")
def baseline(sdk: OpenAI) -> Rows:
    """Layers below and at the steer with scale 0: [2, P, hidden]."""
    return read(sdk, steering(scale=0))


@pytest.fixture(scope="module")
def prompt_tokens(baseline: Rows) -> int:
    """P: one row for each prompt token when one token is generated."""
    return baseline.shape[1]


def moved_rows(steered: Rows, baseline: Rows) -> list[int]:
    """List the positions at which any number differs."""
    return np.flatnonzero((steered != baseline).any(axis=-1)).tolist()


def test_two_tokens_give_a_row_for_each_prompt_token_and_one_more(sdk, prompt_tokens):
    extra = {"output_residual_stream": [LAYER], "apply_steering_vectors": steering()}
    completion = ask(sdk, extra, max_tokens=2)
    stream = residual_stream(completion)
    assert completion.usage.prompt_tokens == prompt_tokens
    assert completion.usage.completion_tokens == 2
    assert stream.shape == (1, prompt_tokens + 1, HIDDEN)
    assert np.isfinite(stream).all()
    described = completion.activations["residual_stream"]
    assert {name: described[name] for name in described if name != "data"} == {
        "dtype": "int16",
        "original_dtype": "torch.bfloat16",
        "shape": [1, prompt_tokens + 1, HIDDEN],
        "compression": "zstd",
    }


def test_the_layer_below_stays_and_the_layer_moves_by_scale_times_vector(sdk, baseline):
    steered = read(sdk, steering(scale=2.5))
    assert np.array_equal(steered[0], baseline[0]), "the Layer below comes before the steer"
    assert_moved_by(steered[1], baseline[1], 2.5 * VECTOR)


def test_scale_0_is_no_steering_bit_for_bit(sdk, baseline):
    plain = ask(sdk, {"output_residual_stream": BELOW_AND_AT})
    assert np.array_equal(residual_stream(plain), baseline)


def test_a_steer_at_the_first_and_at_the_last_layer_is_seen_there(sdk):
    for layer in (0, 29):
        fields = {"activations": [VECTOR.tolist()], "layer_indices": [layer]}
        before = read(sdk, [{**fields, "scale": 0}], [layer])
        after = read(sdk, [{**fields, "scale": 2}], [layer])
        assert_moved_by(after[0], before[0], 2 * VECTOR)


def test_norm_match_adds_scale_times_the_norm_of_each_row(sdk, baseline):
    steered = read(sdk, steering(scale=0.75, norm_match=True))
    assert np.array_equal(steered[0], baseline[0])
    difference = (steered[1] - baseline[1]).astype(np.float64)
    norms = np.linalg.norm(difference, axis=-1)
    wanted = 0.75 * np.linalg.norm(baseline[1].astype(np.float64), axis=-1)
    assert np.allclose(norms, wanted, rtol=0.02), norms / wanted
    along = difference @ VECTOR / np.linalg.norm(VECTOR) / norms
    assert (along > 0.99).all(), "along the vector"


def test_a_chosen_position_moves_alone(sdk, baseline):
    vectors = steering(activations=[[VECTOR.tolist()]], position_indices=[2])
    steered = read(sdk, vectors)
    assert moved_rows(steered[0], baseline[0]) == []
    assert moved_rows(steered[1], baseline[1]) == [2]
    assert_moved_by(steered[1, 2], baseline[1, 2], 2 * VECTOR)


def test_every_position_gets_its_own_vector(sdk, baseline, prompt_tokens):
    rows = np.stack([a_vector(seed) for seed in (1, 2, 3)])
    positions = [prompt_tokens - 1, 0, 3]
    steered = read(sdk, steering(activations=[rows.tolist()], position_indices=positions))
    assert moved_rows(steered[1], baseline[1]) == sorted(positions)
    for row, position in zip(rows, positions, strict=True):
        assert_moved_by(steered[1, position], baseline[1, position], 2 * row)


def test_vectors_without_positions_go_to_the_first_ones(sdk, baseline):
    rows = [VECTOR.tolist(), a_vector(1).tolist()]
    steered = read(sdk, steering(activations=[rows]))
    assert moved_rows(steered[1], baseline[1]) == [0, 1]
    assert_moved_by(steered[1, 1], baseline[1, 1], 2 * a_vector(1))


def test_spans_move_their_positions_alone(sdk, baseline):
    steered = read(sdk, steering(position_spans=[[4, 6], [1, 2]]))
    assert moved_rows(steered[0], baseline[0]) == []
    assert moved_rows(steered[1], baseline[1]) == [1, 4, 5]
    chosen = [1, 4, 5]
    assert_moved_by(steered[1, chosen], baseline[1, chosen], 2 * VECTOR)


def test_a_generated_position_is_steered_when_it_runs(sdk, prompt_tokens):
    at_first_token = {"activations": [[VECTOR.tolist()]], "position_indices": [prompt_tokens]}
    before = read(sdk, steering(scale=0, **at_first_token), max_tokens=2)
    after = read(sdk, steering(scale=2, **at_first_token), max_tokens=2)
    assert moved_rows(after[1], before[1]) == [prompt_tokens]
    assert_moved_by(after[1, -1], before[1, -1], 2 * VECTOR)


def test_a_position_behind_the_end_of_the_text_is_not_steered(sdk: OpenAI, prompt_tokens: int):
    whole = ask(sdk, max_tokens=8).choices[0].text
    word = whole.split()[1]
    last = prompt_tokens + 6
    vectors = steering(activations=[[VECTOR.tolist()]], position_indices=[last], scale=50)
    extra = {"output_residual_stream": [LAYER], "apply_steering_vectors": vectors}
    stopped = ask(sdk, extra, max_tokens=8, stop=[word])
    (choice,) = stopped.choices
    assert (choice.finish_reason, choice.text) == ("stop", whole[: whole.index(word)])
    rows = residual_stream(stopped).shape[1]
    assert rows == stopped.usage.total_tokens - 1 <= last


def test_each_layer_gets_its_row_and_layers_come_back_ascending(sdk, baseline):
    rows = [a_vector(1).tolist(), VECTOR.tolist()]
    vectors = steering(activations=rows, layer_indices=[LAYER + 1, LAYER])
    layers = [LAYER + 1, LAYER, LAYER - 1]
    zero = read(sdk, [{**vectors[0], "scale": 0}], layers)
    steered = read(sdk, vectors, layers)
    assert np.array_equal(zero[:2], baseline)
    assert_moved_by(steered[1], baseline[1], 2 * VECTOR)
    # Layer LAYER + 1 also answers to the steer below it; alone it moves by its own row.
    alone = read(sdk, steering(activations=rows[:1], layer_indices=[LAYER + 1]), layers)
    assert_moved_by(alone[2], zero[2], 2 * a_vector(1))


def test_vectors_of_one_layer_add_up(sdk, baseline):
    other = a_vector(1)
    both = [*steering(scale=1.5), *steering(activations=[other.tolist()], scale=-1)]
    steered = read(sdk, both)
    assert_moved_by(steered[1], baseline[1], 1.5 * VECTOR - other)


def test_encoded_and_stored_vectors_equal_numbers_bit_for_bit(sdk: OpenAI, http: httpx.Client):
    rows = [VECTOR.tolist()]
    stored = http.post("/steering_vectors", json={"activations": rows[0]})
    assert stored.status_code in (200, 201), stored.text
    sent = {
        "numbers": {"activations": rows},
        "float32": {"activations": pack(rows, "float32")},
        "bfloat16": {"activations": pack(rows, "bfloat16")},
        "client, float32": {"activations": encode(rows)},
        "client, bfloat16": {"activations": encode(rows, dtype="bfloat16")},
        "stored": {"vector": stored.json()["id"]},
    }
    answers = {}
    for name, numbers in sent.items():
        vectors = [{**numbers, "layer_indices": [LAYER], "scale": 2}]
        extra = {"output_residual_stream": BELOW_AND_AT, "apply_steering_vectors": vectors}
        completion = ask(sdk, extra, max_tokens=3)
        answers[name] = (completion.choices[0].text, completion.activations)
    for name, answer in answers.items():
        assert answer == answers["numbers"], name


def test_vectors_serialized_by_vllm_lens_equal_their_numbers(sdk: OpenAI, baseline: Rows):
    for name in ("wide float32", "wide bfloat16"):
        sent, numbers = serialized()[name]
        theirs = read(sdk, [sent])
        ours = read(sdk, steering(activations=numbers))
        assert np.array_equal(theirs, ours)
        assert_moved_by(theirs[1], baseline[1], 2 * np.float32(numbers[0]))


def test_lists_of_vectors_are_equal_in_every_form(sdk: OpenAI):
    rows = [[VECTOR.tolist(), a_vector(1).tolist()]]
    forms = (rows, pack(rows, "float32"), encode(rows, dtype="bfloat16"))
    first, *others = (
        read(sdk, steering(activations=form, position_indices=[5, 1])) for form in forms
    )
    assert all(np.array_equal(first, other) for other in others)


def test_a_strong_steer_changes_the_text_and_the_same_request_gives_it_again(sdk: OpenAI):
    texts = [
        ask(sdk, {"apply_steering_vectors": steering(scale=scale)}, max_tokens=6).choices[0].text
        for scale in (0, 8, 8)
    ]
    assert texts[0] != texts[1]
    assert texts[1] == texts[2]
    plain = ask(sdk, max_tokens=6).choices[0].text
    assert plain == texts[0], "scale 0 is no steering"


def test_every_layer_can_be_read_with_true(sdk: OpenAI, prompt_tokens: int):
    completion = ask(sdk, {"output_residual_stream": True}, max_tokens=1)
    stream = residual_stream(completion)
    assert stream.shape == (30, prompt_tokens, HIDDEN)
    one = residual_stream(ask(sdk, {"output_residual_stream": [LAYER]}))
    assert np.array_equal(stream[LAYER], one[0])


def test_captures_come_with_their_layers_and_positions(sdk: OpenAI, prompt_tokens: int):
    extra = {
        "output_residual_stream": [LAYER],
        "captures": [{"name": "ends", "layers": [LAYER], "at": {"phase": "last"}}],
        "apply_steering_vectors": steering(),
    }
    completion = ask(sdk, extra, max_tokens=3)
    assert completion.model == MODEL
    ends = completion.activations["captures"]["ends"]
    assert ends["layers"] == [LAYER]
    assert ends["positions"] == [prompt_tokens - 1, prompt_tokens, prompt_tokens + 1]
    assert np.array_equal(decode(ends), residual_stream(completion)[:, prompt_tokens - 1 :])
