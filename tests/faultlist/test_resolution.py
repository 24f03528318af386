"""Phases, steps and exclusions become absolute positions once, against the prompt's own length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.completions.spec import RequestSpec
from app.completions.validate import Validator
from app.steering.spec import FOREVER, Spans
from tests.completions.models import a_validator

# Eight tokens, of which the tokenizer calls the first (BOS) and the last (EOS) special.
PROMPT = [0, 5, 6, 7, 8, 9, 10, 1]
P = len(PROMPT)


@pytest.fixture
def validator(tmp_path: Path) -> Validator:
    return a_validator(tmp_path)


@pytest.mark.parametrize(
    ("at", "spans"),
    [
        (None, None),
        ({"phase": "all"}, None),
        ({"phase": "prompt"}, ((0, P),)),
        ({"phase": "generated"}, ((P, FOREVER),)),
        ({"phase": "last"}, ((P - 1, FOREVER),)),
        ({"steps": [0, 1]}, ((0, P),)),
        ({"steps": [1, 2]}, ((P, P + 1),)),
        ({"steps": [0, 3]}, ((0, P + 2),)),
        ({"steps": [2, 4]}, ((P + 1, P + 3),)),
        ({"positions": [7, 0, 8]}, ((0, 1), (7, 9))),
        ({"spans": [[9, 10], [2, 5]]}, ((2, 5), (9, 10))),
        ({"exclude": [0]}, ((1, FOREVER),)),
        ({"exclude": "special_tokens"}, ((1, P - 1), (P, FOREVER))),
        ({"phase": "prompt", "exclude": "special_tokens"}, ((1, P - 1),)),
        ({"phase": "last", "steps": [1, 3]}, ((P, P + 2),)),
        ({"spans": [[4, 10]], "steps": [0, 1], "exclude": [5]}, ((4, 5), (6, P))),
    ],
    ids=str,
)
def test_an_at_means_its_positions_for_ops_and_captures_alike(
    validator: Validator, at: dict[str, Any] | None, spans: Spans | None
) -> None:
    op = {"op": "add", "layers": [1], "vector": [1.0] * 8, "at": at}
    capture = {"name": "x", "layers": [1], "at": at}
    (spec,) = validator.check(
        [{"prompt": PROMPT, "max_tokens": 6, "interventions": [op], "captures": [capture]}]
    )
    assert isinstance(spec, RequestSpec), spec
    assert spec.captures[0].spans == spans
    assert (spec.interventions[0].positions, spec.interventions[0].spans) == (None, spans)
