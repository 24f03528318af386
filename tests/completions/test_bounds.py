"""A body costs no more than its rules allow: nothing is looked up, searched or encoded in vain."""

import difflib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from app.completions.captures import CAPTURES_MAX
from app.completions.problems import NEAR_CHARS_MAX
from app.completions.references import captured_of, named_vectors, vectors_of, wanted_rows
from app.completions.rows_of import RowsOf
from app.completions.spec import RequestSpec
from app.completions.validate import Validator
from app.errors import InvalidRequestError
from app.settings import Limits
from app.steering.vectors import Vector
from tests.completions.models import a_validator, problem_of, spec_of

LIMITS = Limits()
ROW = [1.0] * 8
NAME = "sv_" + "0" * 64
LONG = "k" * 5_000_000
FROM = {"job": "job_" + "0" * 32, "request_index": 0, "layer": 1, "positions": [0]}
COPY = {"op": "replace", "layers": [1], "from": FROM}
STEER = {"activations": [ROW], "layer_indices": [1]}
ADD = {"op": "add", "layers": [1], "vector": ROW}


def name(number: int) -> str:
    return f"sv_{number:064x}"


def names(count: int) -> list[str]:
    return [name(number) for number in range(count)]


def steers(count: int) -> dict[str, Any]:
    items = [{"vector": each, "layer_indices": [0]} for each in names(count)]
    return {"apply_steering_vectors": items}


def adds(count: int) -> dict[str, Any]:
    return {
        "interventions": [{"op": "add", "layers": [0], "vector": each} for each in names(count)]
    }


def layered(count: int) -> dict[str, Any]:
    return {"interventions": [{"op": "add", "layers": True, "vectors": names(count)}]}


def projected(count: int) -> dict[str, Any]:
    reduce = {"project": names(count)}
    return {"captures": [{"name": "x", "layers": [0], "reduce": reduce}]}


def captures(count: int) -> dict[str, Any]:
    items = [
        {"name": f"x{place}", "layers": [0], "reduce": {"project": each}}
        for place, each in enumerate(names(count))
    ]
    return {"captures": items}


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (steers, LIMITS.vectors_per_request),
        (adds, LIMITS.interventions_per_request),
        (layered, LIMITS.placed_interventions),
        (projected, LIMITS.capture_directions),
        (captures, CAPTURES_MAX),
    ],
)
def test_names_are_collected_from_a_list_only_while_it_is_as_long_as_it_may_be(
    make: Callable[[int], dict[str, Any]], most: int
) -> None:
    assert len(named_vectors([make(most)], LIMITS)) == most
    assert named_vectors([make(most + 1)], LIMITS) == set()


def test_rows_are_wanted_from_a_list_only_while_it_is_as_long_as_it_may_be() -> None:
    most = LIMITS.interventions_per_request
    copies = [{**COPY, "from": {**FROM, "request_index": place}} for place in range(most + 1)]
    assert len(wanted_rows([{"interventions": copies[:most]}], LIMITS)) == most
    assert wanted_rows([{"interventions": copies}], LIMITS) == set()


class Asked:
    """Stands behind a validator and notes what is looked up; all of it is too much."""

    def __init__(self) -> None:
        self.references: list[object] = []

    def find(self, references: Collection[Any]) -> Mapping[Any, Any]:
        self.references += references
        raise InvalidRequestError("It is too much.", param="other", code="too_much")

    def validator(self, folder: Path, body: Mapping[str, Any]) -> Validator:
        stored: Mapping[str, Vector] = vectors_of(body, LIMITS, self.find)
        captured: Mapping[RowsOf, Vector | str] = captured_of(body, LIMITS, self.find)
        return a_validator(folder, stored=stored, captured=captured, is_job=False)


EARLIER: dict[str, tuple[dict[str, Any], str]] = {
    "too many": ({"interventions": [COPY] * 17}, "17 interventions"),
    "op": ({"interventions": [COPY, {**ADD, "op": "mul"}]}, 'the op "mul"'),
    "field": ({"interventions": [COPY, {**ADD, "scael": 1}]}, "'scael'"),
    "site": ({"interventions": [COPY, {**ADD, "site": "x"}]}, "site"),
    "layers": ({"interventions": [COPY, {**ADD, "layers": [9]}]}, "layer 9"),
    "heads": ({"interventions": [COPY, {**ADD, "heads": [0]}]}, "heads"),
    "at": ({"interventions": [COPY, {**ADD, "at": {"phase": "x"}}]}, "phase"),
    "sources": ({"interventions": [COPY, {**ADD, "vectors": [ROW]}]}, "both"),
    "numbers": (
        {"interventions": [COPY, {**ADD, "vector": [[[0] * 8] * 262_144]}]},
        "numbers, each position counted",
    ),
    "shapes": ({"interventions": [COPY, {**ADD, "vector": [1.0] * 7}]}, "7 numbers"),
    "scale": ({"interventions": [COPY, {**ADD, "scale": "1"}]}, "scale"),
    "range": ({"interventions": [COPY, {**ADD, "vector": [1e39] * 8}]}, "float32"),
    "n": ({"interventions": [COPY], "n": 2}, "n is 2"),
    "too many vectors": (steers(9), "9 Steering vectors"),
    "empty vectors": ({"apply_steering_vectors": []}, "is empty"),
    "n beside vectors": ({**steers(8), "n": 2}, "n is 2"),
    "too many captures": (captures(17), "17 captures"),
    "too many directions": (projected(65), "65 vectors"),
    "name of a capture": (
        {"captures": [{"name": "X", "layers": [0], "reduce": {"project": NAME}}]},
        'the name "X"',
    ),
}


@pytest.mark.parametrize("rule", EARLIER)
def test_an_earlier_rule_is_named_and_nothing_is_looked_up(tmp_path: Path, rule: str) -> None:
    body, says = EARLIER[rule]
    asked = Asked()
    (outcome,) = asked.validator(tmp_path, body).check([{"prompt": "hi", **body}])
    assert isinstance(outcome, list)
    assert says in outcome[0].message
    assert asked.references == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"interventions": [COPY]}, "interventions"),
        (adds(16), "interventions"),
        (layered(4), "interventions"),
        (steers(8), "apply_steering_vectors"),
        (captures(16), "captures"),
        (projected(64), "captures"),
    ],
)
def test_what_is_too_much_to_be_read_is_told_in_its_place(
    tmp_path: Path, body: dict[str, Any], param: str
) -> None:
    asked = Asked()
    validator = asked.validator(tmp_path, body)
    (outcome,) = validator.check([{"prompt": "hi", "temperature": -1, **body}])
    assert isinstance(outcome, list)
    told = [(problem.param, problem.code, problem.message) for problem in outcome]
    assert told[0][0] == "temperature"
    assert told[1:] == [(param, "too_much", "It is too much.")]
    assert len(asked.references) == len(named_vectors([body], LIMITS) | wanted_rows([body], LIMITS))


def test_a_body_that_names_nothing_looks_nothing_up(tmp_path: Path) -> None:
    asked = Asked()
    body = {
        "apply_steering_vectors": [STEER],
        "interventions": [ADD],
        "captures": [{"name": "x", "layers": [0], "reduce": {"project": ROW}}],
    }
    spec = spec_of(asked.validator(tmp_path, body), **body)
    assert len(spec.interventions) == 2
    assert asked.references == []


UNKNOWN: dict[str, dict[str, Any]] = {
    "body": {LONG: 1},
    "Steering vector": {"apply_steering_vectors": [{**STEER, LONG: 1}]},
    "instead of activations": {"apply_steering_vectors": [{LONG: ROW, "layer_indices": [1]}]},
    "encoded": {"apply_steering_vectors": [{**STEER, "activations": {"shape": [1, 8], LONG: 1}}]},
    "intervention": {"interventions": [{**ADD, LONG: 1}]},
    "at": {"interventions": [{**ADD, "at": {LONG: 1}}]},
    "from": {"interventions": [{**COPY, "from": {**FROM, LONG: 1}}]},
    "capture": {"captures": [{"name": "x", "layers": [0], LONG: 1}]},
    "reduce": {"captures": [{"name": "x", "layers": [0], "reduce": {"project": ROW, LONG: 1}}]},
}


@pytest.mark.parametrize("place", UNKNOWN)
def test_no_near_name_is_searched_for_a_name_that_no_field_has(
    validator: Validator, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []
    search = difflib.get_close_matches

    def counted(word: str, *rest: Any, **options: Any) -> list[str]:
        searched.append(len(word))
        return search(word, *rest, **options)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    param, message = problem_of(validator, **UNKNOWN[place])
    assert searched == []
    assert len(message) < 400
    assert len(param or "") <= 200
    problem_of(validator, **{"k" * NEAR_CHARS_MAX: 1})
    assert searched == [NEAR_CHARS_MAX]


class Counted:
    """Counts the characters that go through a tokenizer of the library."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.sizes: list[int] = []

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.sizes.append(sum(map(len, texts)))
        return self._core.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("is_job", [False, True])
def test_of_a_text_far_beyond_the_context_a_piece_is_encoded(
    tmp_path: Path, *, is_job: bool
) -> None:
    validator = a_validator(tmp_path, is_job=is_job)
    tokenizer = validator._tokenizer
    counted = tokenizer._core = Counted(tokenizer._core)  # type: ignore[assignment]
    texts = ["x y" * 1_000_000, "hi", "z" * 3_000_000]
    outcomes = validator.check([{"prompt": text} for text in texts])
    assert sum(counted.sizes) < 40_000
    assert isinstance(outcomes[1], RequestSpec)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, list)
        (problem,) = outcome
        assert (problem.param, problem.code) == ("prompt", "context_length_exceeded")
        assert "at least " in problem.message
        assert "64 tokens" in problem.message


def test_a_text_a_little_beyond_the_context_is_counted_to_the_token(validator: Validator) -> None:
    (outcome,) = validator.check([{"prompt": "x" * 64, "max_tokens": 2}])
    assert isinstance(outcome, list)
    assert "The prompt has 65 tokens and max_tokens is 2" in outcome[0].message


def test_the_texts_of_all_prompts_count_together(tmp_path: Path) -> None:
    validator = a_validator(tmp_path, limits=Limits(prompt_bytes=20), is_job=False)
    (outcome,) = validator.check([{"prompt": ["é" * 5, "x" * 10]}])
    assert outcome == []  # several prompts, nothing wrong with them
    param, message = problem_of(validator, prompt=["é" * 5, "x" * 11])
    assert param == "prompt"
    assert "21 bytes in all; at most 20" in message


def test_bad_words_are_as_many_as_the_engine_takes_in_both_forms(validator: Validator) -> None:
    words = [f"w{number}" for number in range(64)]
    assert len(spec_of(validator, bad_words=words).sampling.bad_words) == 64
    param, message = problem_of(validator, bad_words=[*words, "one more"])
    assert (param, "65 strings; at most 64" in message) == ("bad_words", True)


@pytest.mark.parametrize("blank", [" ", "\n\t", "\u00a0", "\u3000 "])
def test_a_blank_bad_word_is_refused(validator: Validator, blank: str) -> None:
    param, message = problem_of(validator, bad_words=["x", blank])
    assert param == "bad_words"
    assert "blank" in message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"allowed_token_ids": [5], "logit_bias": {"5": -100}}, "logit_bias"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [1], "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [1], "min_tokens": 1, "ignore_eos": True}, "min_tokens"),
        (
            {
                "allowed_token_ids": [1, 5, 6],
                "stop_token_ids": [6],
                "logit_bias": {"5": -100},
                "min_tokens": 2,
            },
            "min_tokens",
        ),
        ({"logit_bias": {str(token): -100 for token in range(258)}}, "logit_bias"),
        ({"stop_token_ids": list(range(258)), "min_tokens": 1}, "min_tokens"),
    ],
)
def test_fields_that_leave_no_token_to_draw_are_refused(
    validator: Validator, body: dict[str, Any], param: str
) -> None:
    named, message = problem_of(validator, **body)
    assert named == param
    assert "none could be drawn" in message


@pytest.mark.parametrize(
    "body",
    [
        {"allowed_token_ids": [5], "stop_token_ids": [5]},
        {"allowed_token_ids": [5, 6], "stop_token_ids": [5], "min_tokens": 1},
        {"allowed_token_ids": [1]},
        {"allowed_token_ids": [5], "logit_bias": {"5": -99}},
        {"logit_bias": {str(token): -100 for token in range(257)}},
        {"stop_token_ids": list(range(2, 258)), "min_tokens": 1},
    ],
)
def test_fields_that_leave_a_token_are_good(validator: Validator, body: dict[str, Any]) -> None:
    assert isinstance(spec_of(validator, **body), RequestSpec)


BROKEN = {"activations": [ROW], "layer_indices": [0, 1]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"apply_steering_vectors": [BROKEN], "interventions": []}, "n is 2"),
        ({"apply_steering_vectors": [STEER], "interventions": []}, "n is 2"),
        ({"apply_steering_vectors": [BROKEN]}, "n is 2"),
        ({"interventions": [{**ADD, "op": "mul"}]}, "n is 2"),
        ({"apply_steering_vectors": [], "interventions": [ADD]}, "is empty"),
        ({"apply_steering_vectors": []}, "is empty"),
        ({"interventions": []}, "0 interventions"),
    ],
)
@pytest.mark.parametrize("several", [{"n": 2}, {"n": 2, "prompt": [[2], [3]]}])
def test_only_the_list_that_would_be_named_may_be_empty_before_n_is_named(
    validator: Validator, body: dict[str, Any], says: str, several: dict[str, Any]
) -> None:
    (outcome,) = validator.check([{"prompt": "hi", **several, **body}])
    assert isinstance(outcome, list)
    assert says in outcome[0].message
    assert outcome[0].param == next(iter(body))
