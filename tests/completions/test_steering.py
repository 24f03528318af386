"""What Steering vectors become, and limits at their exact edge; broken rules are in the corpus."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.completions.validate import Validator
from app.settings import Limits
from app.steering.spec import Intervention, Op, Site
from app.steering.vectors import Vector
from tests.completions.models import a_validator, problem_of, spec_of
from tests.corpus.cases import encoded

PARAM = "apply_steering_vectors"
ROW = [float(number) for number in range(8)]


def interventions(validator: Validator, *sent: dict[str, Any], **body: Any) -> Any:
    return spec_of(validator, apply_steering_vectors=list(sent), **body).interventions


def test_a_row_goes_to_its_layer_at_every_position(validator: Validator) -> None:
    sent = {"activations": [ROW, ROW[::-1]], "layer_indices": [3, 0], "scale": -0.5}
    found = interventions(validator, sent, {**sent, "norm_match": True, "scale": 0})
    numbers = np.array([ROW, ROW[::-1]], dtype="<f4")
    name = Vector("float32", (2, 8), numbers.tobytes()).name
    plain: dict[str, Any] = {"op": Op.add, "site": Site.resid_post, "vector": name, "summed": True}
    assert found == (
        Intervention(layer=3, row=0, scale=-0.5, **plain),
        Intervention(layer=0, row=1, scale=-0.5, **plain),
        Intervention(layer=3, row=0, scale=0.0, norm_match=True, **plain),
        Intervention(layer=0, row=1, scale=0.0, norm_match=True, **plain),
    )
    assert validator.vectors.keys() == {name}
    assert np.array_equal(validator.vectors[name].to_float32(), numbers)


def test_a_list_of_vectors_goes_to_its_positions_or_the_first_ones(validator: Validator) -> None:
    sent = {"activations": [[ROW, ROW], [ROW, ROW]], "layer_indices": [1, 2]}
    first, second = interventions(validator, sent)
    assert (first.row, first.positions) == (0, (0, 1))
    assert (second.row, second.positions) == (2, (0, 1))
    (chosen, _) = interventions(validator, {**sent, "position_indices": [9, 9]})
    assert chosen.positions == (9, 9)


def test_spans_may_come_in_any_order_and_touch(validator: Validator) -> None:
    spans = [[9, 11], [4, 6], [2, 4]]
    sent = {"activations": [ROW], "layer_indices": [1], "position_spans": spans}
    (found,) = interventions(validator, sent)
    assert (found.positions, found.spans) == (None, ((2, 6), (9, 11)))


def test_a_stored_vector_of_one_row_is_shared_by_all_layers(tmp_path: Path) -> None:
    stored = Vector("float32", (8,), np.ones(8, dtype="<f4").tobytes())
    validator = a_validator(tmp_path, stored={stored.name: stored})
    found = interventions(validator, {"vector": stored.name, "layer_indices": [0, 2]})
    assert [(item.layer, item.row, item.vector) for item in found] == [
        (0, 0, stored.name),
        (2, 0, stored.name),
    ]
    assert validator.vectors == {}


@pytest.mark.parametrize("number", [3.4028235e38, -3.4028235e38, 1e-45, 0, 5])
def test_numbers_at_the_edge_of_float32_are_taken(validator: Validator, number: float) -> None:
    interventions(validator, {"activations": [[number] * 8], "layer_indices": [1]})


def test_numbers_are_counted_with_every_position_of_spans(tmp_path: Path) -> None:
    sent = {"activations": [ROW, ROW], "layer_indices": [0, 1], "position_spans": [[0, 3], [5, 7]]}
    numbers = 2 * 8 * 5
    fits = a_validator(tmp_path / "fits", limits=Limits(vector_numbers=2 * numbers))
    assert len(interventions(fits, sent, sent)) == 4
    over = a_validator(tmp_path / "over", limits=Limits(vector_numbers=2 * numbers - 1))
    param, message = problem_of(over, apply_steering_vectors=[sent, sent])
    assert param == PARAM
    assert f"{2 * numbers} numbers" in message


def test_2097152_numbers_fit_and_8_more_do_not(tmp_path: Path) -> None:
    validator = a_validator(tmp_path, max_model_len=300_000)

    def sent(positions: int) -> dict[str, Any]:
        return {"activations": encoded(shape=[1, positions, 8]), "layer_indices": [0]}

    largest = 2_097_152 // 8
    found = interventions(validator, sent(largest), max_tokens=largest)
    assert len(found[0].positions) == largest
    message = problem_of(validator, apply_steering_vectors=[sent(largest + 1)])[1]
    assert "at most 2097152" in message


def test_4096_positions_of_spans_fit_and_one_more_does_not(tmp_path: Path) -> None:
    validator = a_validator(tmp_path, max_model_len=5000)

    def sent(end: int) -> dict[str, Any]:
        return {"activations": [ROW], "layer_indices": [0], "position_spans": [[0, end]]}

    assert interventions(validator, sent(4096), max_tokens=4900)
    message = problem_of(validator, apply_steering_vectors=[sent(4097)], max_tokens=4900)[1]
    assert "4097 positions" in message


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "last"), [(4, 2, 4), (1, 1, 0), (60, 4, 62), (63, 1, 62)]
)
def test_the_last_position_that_runs_can_be_steered_and_no_later_one(
    validator: Validator, prompt_tokens: int, max_tokens: int, last: int
) -> None:
    body = {"prompt": [2] * prompt_tokens, "max_tokens": max_tokens}

    def sent(position: int) -> list[dict[str, Any]]:
        one = {"activations": [[ROW]], "layer_indices": [0], "position_indices": [position]}
        span = {"activations": [ROW], "layer_indices": [0]}
        return [one, {**span, "position_spans": [[position, position + 1]]}]

    for item in sent(last):
        assert interventions(validator, item, **body)
    for item in sent(last + 1):
        param, message = problem_of(validator, apply_steering_vectors=[item], **body)
        assert param == PARAM
        assert f"position {last + 1}, but this request reaches positions 0 to {last}" in message


def test_one_list_is_judged_once_but_its_reach_for_each_request(validator: Validator) -> None:
    shared = [{"activations": [[ROW]], "layer_indices": [0], "position_indices": [10]}]
    good = {"prompt": [2] * 10, "apply_steering_vectors": shared}
    short = {"prompt": [2], "max_tokens": 2, "apply_steering_vectors": shared}
    first, second, third = validator.check([good, short, good])
    assert first == third
    assert isinstance(second, list)


def test_bfloat16_numbers_arrive_bit_for_bit(validator: Validator) -> None:
    sent = {"activations": encoded(shape=[1, 8], value=-2.5, kind="bfloat16"), "layer_indices": [1]}
    (found,) = interventions(validator, sent)
    vector = validator.vectors[found.vector]
    assert vector.dtype == "bfloat16"
    assert vector.to_float32().tolist() == [[-2.5] * 8]
