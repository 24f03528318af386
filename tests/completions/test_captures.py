"""What `captures` become, and how many bytes they may need."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.completions.captures import capture_bytes
from app.completions.spec import RequestSpec, spec_from_json, spec_to_json
from app.completions.validate import Validator
from app.settings import Limits
from app.steering.spec import FOREVER, Capture, Direction, Reduce, Site
from app.steering.vectors import Vector
from tests.completions.models import a_validator, problem_of, spec_of
from tests.corpus.cases import encoded

ROW = [float(number) for number in range(8)]
PROMPT = [2] * 5
NAMED: dict[str, Any] = {"name": "a", "layers": [1]}


def captures(validator: Validator, *sent: dict[str, Any], **body: Any) -> tuple[Capture, ...]:
    spec = spec_of(validator, **{"prompt": PROMPT, "captures": list(sent), **body})
    assert spec_from_json(spec_to_json(spec)) == spec
    return spec.captures


def test_every_field_arrives(validator: Validator) -> None:
    found = captures(
        validator,
        {"name": "plain", "layers": [3, 1]},
        {"name": "early", "layers": True, "site": "z", "when": "before", "reduce": "none"},
        {"name": "mean", "layers": [0], "at": {"phase": "prompt"}, "reduce": "mean"},
        {"name": "norm", "layers": [0], "at": {"positions": [6, 1]}, "reduce": "norm"},
        {"name": "nulls", **dict.fromkeys(("site", "at", "when", "reduce")), "layers": [2]},
        output_residual_stream=[2, 0],
    )
    assert found == (
        Capture("residual_stream", Site.resid_post, (0, 2)),
        Capture("plain", Site.resid_post, (1, 3)),
        Capture("early", Site.z, (0, 1, 2, 3), before=True),
        Capture("mean", Site.resid_post, (0,), spans=((0, 5),), reduce=Reduce.mean),
        Capture("norm", Site.resid_post, (0,), spans=((1, 2), (6, 7)), reduce=Reduce.norm),
        Capture("nulls", Site.resid_post, (2,)),
    )


def test_directions_come_in_every_form_and_in_order(tmp_path: Path) -> None:
    stored = Vector("float32", (2, 8), np.ones((2, 8), dtype="<f4").tobytes())
    validator = a_validator(tmp_path, stored={stored.name: stored})

    def directions(project: Any, **fields: Any) -> tuple[tuple[Direction, ...], bool]:
        spec = spec_of(validator, captures=[{**NAMED, "reduce": {"project": project, **fields}}])
        (capture,) = spec.captures
        assert capture.reduce is Reduce.project
        return capture.directions, capture.unit

    one = Vector("float32", (8,), np.array(ROW, "<f4").tobytes()).name
    two = Vector("float32", (2, 8), np.array([ROW, ROW], "<f4").tobytes()).name
    assert directions(ROW) == ((Direction(one),), True)
    assert directions([ROW, ROW], unit=False) == ((Direction(two, 0), Direction(two, 1)), False)
    assert directions(stored.name, unit=True)[0] == (
        Direction(stored.name, 0),
        Direction(stored.name, 1),
    )
    assert directions([stored.name, ROW, encoded(shape=[8], value=1)], unit=None)[0][2:] == (
        Direction(one),
        Direction(Vector("float32", (8,), np.ones(8, "<f4").tobytes()).name),
    )
    assert validator.vectors.keys() >= {one, two}
    assert stored.name not in validator.vectors


def test_64_directions_fit_and_65_do_not(validator: Validator) -> None:
    def sent(project: Any) -> list[dict[str, Any]]:
        return [{**NAMED, "reduce": {"project": project}}]

    (found,) = spec_of(validator, captures=sent([ROW] * 64)).captures
    assert (len(found.directions), found.width(8)) == (64, 64)
    sixty = encoded(shape=[60, 8], value=1)
    assert "65 directions" in problem_of(validator, captures=sent([ROW] * 65))[1]
    assert "65 directions" in problem_of(validator, captures=sent([sixty, *[ROW] * 5]))[1]
    assert "65 vectors" in problem_of(validator, captures=sent([sixty] * 65))[1]


def test_positions_are_resolved_for_each_prompt_of_a_shared_list(validator: Validator) -> None:
    shared = [{**NAMED, "at": {"phase": "last"}}]
    bodies = [{"prompt": [2] * length, "captures": shared} for length in (5, 1, 3, 5)]
    outcomes = validator.check(bodies)
    assert [o.captures[0].spans for o in outcomes if isinstance(o, RequestSpec)] == [
        ((4, FOREVER),),
        None,
        ((2, FOREVER),),
        ((4, FOREVER),),
    ]


def test_spans_that_are_read_may_be_long(tmp_path: Path) -> None:
    validator = a_validator(tmp_path, max_model_len=10_000)
    sent = {**NAMED, "at": {"spans": [[0, 9000]]}}
    assert captures(validator, sent, max_tokens=9000)[0].spans == ((0, 9000),)


@pytest.mark.parametrize(
    ("extra", "size"),
    [
        ({}, 8 * 16 * 2),
        ({"layers": [0, 1, 2]}, 3 * 8 * 16 * 2),
        ({"site": "z"}, 8 * 20 * 2),
        ({"at": {"phase": "prompt"}}, 5 * 16 * 2),
        ({"at": {"phase": "last"}}, 4 * 16 * 2),
        ({"at": {"phase": "generated"}}, 3 * 16 * 2),
        ({"at": {"spans": [[1, 3], [6, 8]]}}, 4 * 16 * 2),
        ({"reduce": "mean"}, 8 * 16 * 2),
        ({"reduce": "norm"}, 8 * 4),
        ({"reduce": "norm", "layers": [0, 1]}, 2 * 8 * 4),
        ({"reduce": {"project": [[1.0] * 16] * 3}}, 8 * 3 * 4),
        ({"reduce": {"project": [1.0] * 16}, "at": {"positions": [4]}}, 4),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_rows_that_are_read(
    tmp_path: Path, extra: dict[str, Any], size: int
) -> None:
    """5 prompt tokens and 4 generated ones run 8 positions; a bfloat16 number has 2 bytes."""
    model: dict[str, Any] = {"dtype": "bfloat16", "hidden_size": 16, "head_dim": 10}
    body = {"prompt": PROMPT, "max_tokens": 4, "captures": [{**NAMED, **extra}]}
    fits = a_validator(tmp_path / "fits", limits=Limits(capture_bytes_request=size), **model)
    spec = spec_of(fits, **body)
    assert capture_bytes(spec.captures, fits._model, rows=8) == size
    over = a_validator(tmp_path / "over", limits=Limits(capture_bytes_request=size - 1), **model)
    param, message = problem_of(over, **body)
    assert param == "captures"
    assert f"up to {size} bytes" in message


def test_all_captures_of_a_request_count_together(tmp_path: Path) -> None:
    size = 2 * 8 * 8 * 4
    body = {"prompt": PROMPT, "max_tokens": 4, "captures": [NAMED], "output_residual_stream": [0]}
    fits = a_validator(tmp_path / "fits", limits=Limits(capture_bytes_request=size))
    assert len(spec_of(fits, **body).captures) == 2
    over = a_validator(tmp_path / "over", limits=Limits(capture_bytes_request=size - 1))
    assert problem_of(over, **body)[0] == "output_residual_stream"
