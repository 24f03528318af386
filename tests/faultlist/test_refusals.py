"""What would silently do something else is refused: negative positions, unreached ones, typos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.completions.validate import Validator
from tests.completions.models import a_validator, problem_of

ROW = [1.0] * 8


@pytest.fixture
def validator(tmp_path: Path) -> Validator:
    return a_validator(tmp_path)


def refused(validator: Validator, **fields: Any) -> str:
    op = {"op": "add", "layers": [1], "vector": ROW, **fields}
    param, message = problem_of(validator, prompt=[5, 6, 7], max_tokens=4, interventions=[op])
    assert param == "interventions"
    return message


@pytest.mark.parametrize(
    "at",
    [{"positions": [-1]}, {"positions": [2, -3]}, {"spans": [[-2, 1]]}, {"exclude": [-1]}],
    ids=str,
)
def test_a_negative_position_is_refused_with_a_hint_to_last(
    validator: Validator, at: dict[str, Any]
) -> None:
    message = refused(validator, at=at)
    assert "from 0" in message
    assert '{"phase": "last"}' in message


@pytest.mark.parametrize(
    "at", [{"positions": [6]}, {"spans": [[5, 7]]}, {"steps": [0, 5]}, {"exclude": [9]}], ids=str
)
def test_a_position_that_no_pass_reaches_is_refused(
    validator: Validator, at: dict[str, Any]
) -> None:
    assert "this request" in refused(validator, at=at)


def test_a_misspelled_field_is_refused_by_name(validator: Validator) -> None:
    assert "'scael'" in refused(validator, scael=2).replace('"', "'")
    assert "'coeff'" in refused(validator, coeff=2).replace('"', "'")
