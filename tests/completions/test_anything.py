"""Whatever stands anywhere in a body, the validator answers: a spec, or what is wrong with it."""

import copy
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.completions.spec import RequestSpec, spec_from_json, spec_to_json
from app.completions.validate import Validator
from tests.completions.models import a_validator
from tests.corpus.cases import encoded

ROW = [1.0] * 8
JOB = "job_" + "0" * 32
ENCODED = encoded(shape=[2, 8])
BODY: dict[str, Any] = {
    "prompt": "hello",
    "max_tokens": 4,
    "output_residual_stream": [1],
    "apply_steering_vectors": [
        {"activations": [ROW], "layer_indices": [1], "position_spans": [[0, 2]], "scale": 2},
        {"activations": ENCODED, "layer_indices": [1, 2], "norm_match": True},
    ],
    "interventions": [
        {"op": "add", "layers": [1], "vector": [[ROW, ROW]], "at": {"positions": [0, 3]}},
        {"op": "orthogonal", "layers": True, "vector": ROW, "coeff": 0.5, "site": "attn_out"},
        {"op": "cap", "layers": [0, 3], "vectors": [ROW, encoded(shape=[8])], "min": 0, "max": 1},
        {"op": "replace", "layers": [0, 1], "vector": ENCODED, "site": "z", "heads": [0]},
        {"op": "add", "layers": [2], "vector": ROW, "at": {"steps": [0, 2], "exclude": [1]}},
        {
            "op": "replace",
            "layers": [1],
            "from": {"job": JOB, "request_index": 0, "layer": 0, "site": "z", "positions": [0]},
            "at": {"positions": [2], "exclude": "special_tokens"},
        },
    ],
    "captures": [
        {"name": "a", "layers": [1], "site": "z", "at": {"spans": [[0, 2]]}, "when": "before"},
        {"name": "b", "layers": True, "reduce": {"project": [ROW, ROW], "unit": False}},
        {"name": "c", "layers": [0], "at": {"phase": "last"}, "reduce": "mean"},
    ],
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.sampled_from([-1, 0, 1, 2, 8, 9, 2**31 - 2, 2**31 - 1, 2**31])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "add", "last", "z", "sv_" + "0" * 64, JOB, "special_tokens", "é\n"])
)
FIELDS = ["op", "at", "from", "vector", "vectors", "layers", "positions", "spans", "shape", "x"]
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def shared_validator(tmp_path_factory: pytest.TempPathFactory) -> Validator:
    return a_validator(tmp_path_factory.mktemp("model"))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """List the containers and keys below a value; of a list only the first three items."""
    keys = value if isinstance(value, dict) else range(min(len(value), 3))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_in_any_place_gets_an_answer(
    shared_validator: Validator, data: st.DataObject
) -> None:
    body = copy.deepcopy(BODY)
    for _ in range(data.draw(st.integers(1, 3))):
        spots = list(places(body))
        container, key = spots[data.draw(st.integers(0, len(spots) - 1))]
        if data.draw(st.integers(0, 4)) == 0:
            del container[key]
        else:
            container[key] = data.draw(VALUES)
    (outcome,) = shared_validator.check([body])
    if isinstance(outcome, RequestSpec):
        assert spec_from_json(orjson.loads(orjson.dumps(spec_to_json(outcome)))) == outcome
    else:
        assert outcome
        assert all(problem.message for problem in outcome)


def test_the_body_itself_lacks_nothing_but_the_rows_of_another_job(
    shared_validator: Validator,
) -> None:
    (outcome,) = shared_validator.check([copy.deepcopy(BODY)])
    assert isinstance(outcome, list)
    assert [problem.message[:22] for problem in outcome] == ["interventions[5].from "]
