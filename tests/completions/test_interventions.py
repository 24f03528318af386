"""What `interventions` become, and limits at their exact edge; broken rules are in the corpus."""

from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from app.completions.rows_of import RowsOf
from app.completions.spec import RequestSpec, spec_from_json, spec_to_json
from app.completions.validate import Validator
from app.settings import Limits
from app.steering.spec import FOREVER, Intervention, Op, Site
from app.steering.vectors import Vector
from tests.completions.models import a_validator, problem_of, spec_of
from tests.corpus.cases import encoded

PARAM = "interventions"
ROW = [float(number) for number in range(8)]
ADD: dict[str, Any] = {"op": "add", "layers": [1], "vector": ROW}
PROMPT = [2] * 5
JOB = "job_" + "0" * 31 + "7"


def a_vector(*shape: int, value: float = 1.0) -> Vector:
    return Vector("float32", shape, np.full(shape, value, dtype="<f4").tobytes())


def interventions(
    validator: Validator, *sent: dict[str, Any], **body: Any
) -> tuple[Intervention, ...]:
    spec = spec_of(validator, **{"prompt": PROMPT, "interventions": list(sent), **body})
    assert spec_from_json(spec_to_json(spec)) == spec
    return spec.interventions


def test_every_field_of_every_op_arrives(validator: Validator) -> None:
    found = interventions(
        validator,
        {**ADD, "scale": -2, "norm_match": True},
        {"op": "orthogonal", "layers": [0], "vector": ROW, "coeff": 0.5, "site": "mlp_out"},
        {"op": "orthogonal", "layers": [0], "vector": ROW},
        {"op": "cap", "layers": [3], "vector": ROW, "min": -1, "max": 2.5, "site": "resid_mid"},
        {"op": "cap", "layers": [3], "vector": ROW, "min": None, "max": 0},
        {"op": "replace", "layers": [2], "vector": ROW, "site": "z", "heads": [1, 0]},
    )
    numbers = np.array(ROW, dtype="<f4")
    name = Vector("float32", (8,), numbers.tobytes()).name
    add, ortho, cap, replace = Op.add, Op.orthogonal, Op.cap, Op.replace
    assert found == (
        Intervention(add, Site.resid_post, 1, name, 0, scale=-2.0, norm_match=True),
        Intervention(ortho, Site.mlp_out, 0, name, 0, coeff=0.5),
        Intervention(ortho, Site.resid_post, 0, name, 0, coeff=0.0),
        Intervention(cap, Site.resid_mid, 3, name, 0, low=-1.0, high=2.5),
        Intervention(cap, Site.resid_post, 3, name, 0, high=0.0),
        Intervention(replace, Site.z, 2, name, 0, heads=(0, 1)),
    )
    assert validator.vectors.keys() == {name}, "equal numbers are kept once"
    assert np.array_equal(validator.vectors[name].to_float32(), numbers)


def test_null_counts_as_not_sent(validator: Validator) -> None:
    nulls = dict.fromkeys(("site", "at", "heads", "scale", "norm_match", "vectors"))
    assert interventions(validator, {**ADD, **nulls}) == interventions(validator, ADD)
    assert spec_of(validator, interventions=None).interventions == ()


def test_one_vector_is_shared_by_all_layers_and_rows_go_to_layers_as_sent(
    validator: Validator,
) -> None:
    shared = interventions(validator, {**ADD, "layers": True})
    assert [(item.layer, item.row) for item in shared] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    rows = interventions(validator, {**ADD, "layers": [3, 0], "vector": [ROW, ROW[::-1]]})
    assert [(item.layer, item.row) for item in rows] == [(3, 0), (0, 1)]
    assert validator.vectors[rows[0].vector].to_float32().tolist() == [ROW, ROW[::-1]]


def test_a_row_for_each_position_goes_by_layers_and_positions(validator: Validator) -> None:
    vector = [[ROW, ROW, ROW], [ROW, ROW, ROW]]
    sent = {**ADD, "layers": [2, 1], "vector": vector, "at": {"positions": [4, 0, 6]}}
    first, second = interventions(validator, sent)
    assert (first.layer, first.row, first.positions) == (2, 0, (4, 0, 6))
    assert (second.layer, second.row, second.positions) == (1, 3, (4, 0, 6))
    assert first.spans is None


def test_left_out_positions_keep_the_rows_of_the_others(validator: Validator) -> None:
    sent = {**ADD, "vector": [[ROW] * 5], "at": {"positions": [0, 1, 6, 3, 2], "exclude": [1]}}
    found = interventions(validator, sent)
    assert [(item.row, item.positions) for item in found] == [(0, (0,)), (2, (6, 3, 2))]
    sent["at"] = {"positions": [0, 1, 6, 3, 2], "steps": [0, 1]}
    found = interventions(validator, sent)
    assert [(item.row, item.positions) for item in found] == [(0, (0, 1)), (3, (3, 2))]


def test_vectors_gives_each_layer_its_own_in_any_form(tmp_path: Path) -> None:
    stored = [a_vector(8, value=5), a_vector(1, 8, value=6)]
    validator = a_validator(tmp_path, stored={vector.name: vector for vector in stored})
    forms = [stored[0].name, ROW, encoded(shape=[8], value=7), stored[1].name]
    sent = {"op": "add", "layers": [3, 2, 1, 0], "vectors": forms}
    found = interventions(validator, sent)
    inline = [Vector("float32", (8,), np.array(ROW, "<f4").tobytes()), a_vector(8, value=7)]
    names = [stored[0].name, inline[0].name, inline[1].name, stored[1].name]
    assert [(item.layer, item.vector, item.row) for item in found] == [
        (3, names[0], 0),
        (2, names[1], 0),
        (1, names[2], 0),
        (0, names[3], 0),
    ]
    assert validator.vectors.keys() == {vector.name for vector in inline}


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [[8], [2, 8], [2, 3, 8]])
def test_the_encoded_form_takes_every_shape(
    validator: Validator, shape: list[int], kind: str
) -> None:
    sent = {
        "op": "replace",
        "layers": [0, 1],
        "vector": encoded(shape=shape, value=-2.5, kind=kind),
        "at": {"positions": [0, 1, 2]},
    }
    found = interventions(validator, sent)
    vector = validator.vectors[found[0].vector]
    assert (vector.dtype, vector.shape) == (kind, tuple(shape))
    assert (vector.to_float32() == -2.5).all()
    assert [item.row for item in found] == [0, {1: 0, 2: 1, 3: 3}[len(shape)]]


def test_numbers_sent_and_numbers_stored_have_one_name(tmp_path: Path) -> None:
    stored = a_vector(8)
    validator = a_validator(tmp_path, stored={stored.name: stored})
    (found,) = interventions(validator, {**ADD, "vector": [1.0] * 8})
    assert found.vector == stored.name
    assert validator.vectors == {}


def test_positions_are_resolved_for_each_prompt_of_a_shared_list(validator: Validator) -> None:
    shared = [{**ADD, "at": {"phase": "generated"}}, {**ADD, "at": {"exclude": "special_tokens"}}]
    bodies = [{"prompt": ids, "interventions": shared} for ids in ([2] * 5, [0, 2], [2, 2, 1, 2])]
    outcomes = validator.check([*bodies, *bodies])
    spans = [
        [item.spans for item in outcome.interventions]
        for outcome in outcomes
        if isinstance(outcome, RequestSpec)
    ]
    assert spans == 2 * [
        [((5, FOREVER),), None],
        [((2, FOREVER),), ((1, FOREVER),)],
        [((4, FOREVER),), ((0, 2), (3, FOREVER))],
    ]


def test_a_shared_list_is_judged_once_but_its_reach_for_each_request(
    validator: Validator,
) -> None:
    shared = [{**ADD, "at": {"positions": [7]}}]
    good = {"prompt": PROMPT, "max_tokens": 4, "interventions": shared}
    short = {"prompt": PROMPT, "max_tokens": 3, "interventions": shared}
    outcomes = validator.check([good, short, good, short])
    assert [isinstance(outcome, RequestSpec) for outcome in outcomes] == [True, False] * 2
    assert validator._interventions.read(shared) is validator._interventions.read(shared)
    first, _, third, _ = outcomes
    assert isinstance(first, RequestSpec)
    assert isinstance(third, RequestSpec)
    assert first.interventions is third.interventions


def test_a_position_out_of_reach_is_refused_with_the_reach_of_the_request(
    validator: Validator,
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    sent = {**ADD, "at": {"positions": [6]}}
    param, message = problem_of(validator, interventions=[ADD, sent], **body)
    assert param == PARAM
    assert message.startswith("interventions[1].at names position 6, but this request reaches")
    assert "positions 0 to 5" in message
    assert "max_tokens is 2" in message


def test_steering_vectors_come_first_and_add_up(validator: Validator) -> None:
    steering = [{"activations": [ROW], "layer_indices": [1]}]
    old, new = interventions(validator, ADD, apply_steering_vectors=steering)
    assert (old.summed, new.summed) == (True, False)


def test_generated_of_one_token_is_taken(validator: Validator) -> None:
    (found,) = interventions(validator, {**ADD, "at": {"phase": "generated"}}, max_tokens=1)
    assert found.spans == ((5, FOREVER),)


def rows(*positions: int) -> RowsOf:
    return RowsOf(UUID(int=7), 0, None, 3, Site.resid_post, positions)


def test_rows_of_another_job_go_to_their_positions(tmp_path: Path) -> None:
    captured = {rows(1, 4): a_vector(2, 8, value=3), rows(2): a_vector(1, 8, value=4)}
    validator = a_validator(tmp_path, captured=captured)
    source = {"job": JOB, "request_index": 0, "layer": 3}
    found = interventions(
        validator,
        {"op": "replace", "layers": [3, 1], "from": {**source, "positions": [1, 4]}},
        {
            "op": "replace",
            "layers": [0],
            "from": {**source, "positions": [1, 4]},
            "at": {"positions": [5, 0]},
        },
        {"op": "replace", "layers": [0], "from": source, "at": {"positions": [2]}},
        {
            "op": "replace",
            "layers": [2],
            "from": {**source, "positions": [1, 4]},
            "at": {"exclude": [1]},
        },
    )
    two, one = captured.values()
    assert [(item.layer, item.vector, item.row, item.positions) for item in found] == [
        (3, two.name, 0, (1, 4)),
        (1, two.name, 0, (1, 4)),
        (0, two.name, 0, (5, 0)),
        (0, one.name, 0, (2,)),
        (2, two.name, 1, (4,)),
    ]
    assert validator.vectors == {two.name: two, one.name: one}, "copied, so that they stay"


def test_rows_that_cannot_be_had_are_refused_with_the_reason(tmp_path: Path) -> None:
    captured: dict[RowsOf, Vector | str] = {
        rows(1): f"request 0 of {JOB} has not finished",
        rows(2): a_vector(1, 9),
    }
    validator = a_validator(tmp_path, captured=captured)
    says = {
        1: f"cannot be had: request 0 of {JOB} has not finished.",
        2: "8 wide",
        3: "does not have",
    }
    for position, text in says.items():
        source = {"job": JOB, "request_index": 0, "layer": 3, "positions": [position]}
        sent = {"op": "replace", "layers": [0], "from": source}
        param, message = problem_of(validator, prompt=PROMPT, interventions=[sent])
        assert param == PARAM
        assert message.startswith("interventions[0].from ")
        assert text in message


@pytest.mark.parametrize(
    ("extra", "copies"),
    [
        ({}, 1),
        ({"at": {"phase": "prompt"}}, 1),
        ({"at": {"positions": [0, 2, 4]}}, 3),
        ({"at": {"spans": [[0, 2], [5, 8]]}}, 5),
    ],
    ids=str,
)
def test_numbers_are_counted_at_every_position_that_is_named(
    tmp_path: Path, extra: dict[str, Any], copies: int
) -> None:
    sent = [{**ADD, **extra}, {**ADD, "layers": [0, 1], "vector": [ROW, ROW], **extra}]
    numbers = 3 * 8 * copies
    fits = a_validator(tmp_path / "fits", limits=Limits(vector_numbers=numbers))
    assert len(interventions(fits, *sent)) == 3
    over = a_validator(tmp_path / "over", limits=Limits(vector_numbers=numbers - 1))
    param, message = problem_of(over, prompt=PROMPT, interventions=sent)
    assert param == PARAM
    assert f"{numbers} numbers" in message


def test_a_stored_vector_and_captured_rows_count_once(tmp_path: Path) -> None:
    stored, both = a_vector(8), a_vector(2, 8)
    source = {"job": JOB, "request_index": 0, "layer": 3, "positions": [1, 4]}
    sent = [
        {**ADD, "layers": True, "vector": stored.name, "at": {"positions": [0, 1, 2]}},
        {"op": "replace", "layers": True, "from": source},
    ]
    for limit, fits in ((24, True), (23, False)):
        validator = a_validator(
            tmp_path / str(limit),
            limits=Limits(vector_numbers=limit),
            stored={stored.name: stored},
            captured={rows(1, 4): both},
        )
        (outcome,) = validator.check([{"prompt": PROMPT, "interventions": sent}])
        assert isinstance(outcome, RequestSpec) is fits


def test_numbers_of_steering_vectors_count_too_whatever_was_judged_before(tmp_path: Path) -> None:
    validator = a_validator(tmp_path, limits=Limits(vector_numbers=8))
    shared = [ADD]
    steering = [{"activations": [ROW], "layer_indices": [1]}]
    alone = {"prompt": PROMPT, "interventions": shared}
    both = {**alone, "apply_steering_vectors": steering}
    outcomes = validator.check([alone, both, alone])
    assert [isinstance(outcome, RequestSpec) for outcome in outcomes] == [True, False, True]
    assert isinstance(outcomes[1], list)
    assert "16 numbers together" in outcomes[1][0].message


def test_16_interventions_fit_and_17_do_not(validator: Validator) -> None:
    assert len(interventions(validator, *[ADD] * 16)) == 16
    assert "1 to 16" in problem_of(validator, interventions=[ADD] * 17)[1]


def test_layers_and_stretches_between_excluded_positions_are_capped(tmp_path: Path) -> None:
    sent = {**ADD, "layers": [0, 1], "vector": [[ROW] * 5] * 2}
    sent["at"] = {"positions": [0, 1, 2, 3, 4], "exclude": [1, 3]}
    fits = a_validator(tmp_path / "fits", limits=Limits(placed_interventions=6))
    assert len(interventions(fits, sent)) == 6
    over = a_validator(tmp_path / "over", limits=Limits(placed_interventions=5))
    param, message = problem_of(over, prompt=PROMPT, interventions=[sent])
    assert param == PARAM
    assert "more than 5 interventions" in message


def test_stretches_of_all_layers_together_are_capped(tmp_path: Path) -> None:
    spans = {**ADD, "layers": [0, 1], "at": {"spans": [[0, 1], [2, 3], [4, 5]]}}
    everywhere = {**ADD, "layers": [2]}
    fits = a_validator(tmp_path / "fits", limits=Limits(placed_stretches=7))
    assert len(interventions(fits, spans, everywhere)) == 3
    over = a_validator(tmp_path / "over", limits=Limits(placed_stretches=6))
    param, message = problem_of(over, prompt=PROMPT, interventions=[spans, everywhere])
    assert param == PARAM
    assert "7 stretches of positions" in message


def test_the_width_is_that_of_the_site(tmp_path: Path) -> None:
    validator = a_validator(tmp_path, head_dim=5)
    (found,) = interventions(validator, {**ADD, "site": "z", "vector": [1.0] * 10})
    assert found.site is Site.z
    message = problem_of(validator, interventions=[{**ADD, "site": "z"}])[1]
    assert "rows of 8 numbers, but the site z of tiny is 10 wide" in message


def test_a_site_that_the_model_does_not_have_is_refused_with_those_it_has(tmp_path: Path) -> None:
    sites = (Site.resid_pre, Site.resid_post)
    parallel = a_validator(tmp_path / "parallel", sites=sites)
    message = problem_of(parallel, interventions=[{**ADD, "site": "resid_mid"}])[1]
    assert message == 'interventions[0] has the site "resid_mid"; tiny has resid_pre, resid_post.'
    none = a_validator(tmp_path / "none", sites=(), architecture="MambaForCausalLM")
    steering = [{"activations": [ROW], "layer_indices": [1]}]
    for field, sent in (
        ("interventions", [ADD]),
        ("apply_steering_vectors", steering),
        ("captures", [{"name": "a", "layers": [1]}]),
        ("output_residual_stream", [1]),
    ):
        param, message = problem_of(none, **{field: sent})
        assert param == field
        assert "MambaForCausalLM" in message


def test_rules_are_named_in_their_order(validator: Validator) -> None:
    """Each step mends the rule that was named, so that the next one comes up."""
    bad: dict[str, Any] = {
        "op": "ad",
        "scael": 1,
        "site": "resid",
        "layers": [9],
        "heads": [0],
        "at": {"phase": "x"},
        "vectors": [[1.0] * 7],
        "vector": [1.0] * 7,
        "scale": "x",
    }
    steps: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ('the op "ad"', {"op": "add"}, ()),
        ("no field 'scael'", {}, ("scael",)),
        ('the site "resid"', {"site": "resid_post"}, ()),
        ("names layer 9", {"layers": [1]}, ()),
        ("has heads", {}, ("heads",)),
        ('the phase "x"', {"at": {"positions": [40]}}, ()),
        ("both vector and vectors", {}, ("vectors",)),
        ("rows of 7 numbers", {"vector": [1e39] * 8}, ()),
        ('has scale "x"', {"scale": 1e38}, ()),
        ("holds 1e+39", {"vector": [1e37] * 8}, ()),
        ("their product", {"scale": 1}, ()),
        ("names position 40", {"at": {"positions": [4]}}, ()),
    ]
    for says, change, drop in steps:
        # The second one breaks the first rule that is left, so a rule looks at all before the next.
        message = problem_of(validator, prompt=PROMPT, interventions=[ADD, bad])[1]
        assert message.startswith("interventions[1]")
        assert says in message
        bad = {name: value for name, value in {**bad, **change}.items() if name not in drop}
    assert len(interventions(validator, ADD, bad)) == 2


@pytest.mark.parametrize("number", [3.4028235e38, -3.4028235e38, 1e-45, 0, -0.0, 5])
def test_numbers_at_the_edge_of_float32_are_taken_everywhere(
    validator: Validator, number: float
) -> None:
    plain = {"layers": [0], "vector": [number] * 8}
    interventions(
        validator,
        {"op": "add", **plain},
        {"op": "add", "layers": [0], "vector": [1.0] * 8, "scale": number},
        {"op": "orthogonal", **plain, "coeff": number},
        {"op": "cap", **plain, "min": number, "max": number},
        {"op": "replace", **plain},
    )
