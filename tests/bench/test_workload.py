"""The benchmarks' own arithmetic: what an op must make of a row, and what counts as right."""

import dataclasses

import numpy as np
import pytest

from app.steering.spec import Op
from bench.workload import (
    CAP,
    NORM_SCALE,
    OPS,
    SCALE,
    WIDTH,
    Load,
    Turn,
    prompts,
    share_right,
    spec_of,
    steered_by,
    turn_from_line,
    turn_to_line,
)

ROWS = np.random.default_rng(1).standard_normal((5, WIDTH)).astype(np.float32) * 3
VECTOR = np.random.default_rng(2).standard_normal(WIDTH).astype(np.float32)
UNIT = VECTOR / np.linalg.norm(VECTOR)


def to_bfloat16(rows):
    bits = rows.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def test_add_moves_every_row_by_scale_times_the_vector():
    moved = steered_by("add", ROWS, VECTOR) - ROWS
    np.testing.assert_allclose(moved, np.tile(SCALE * VECTOR, (5, 1)), rtol=1e-4, atol=1e-4)


def test_norm_match_moves_a_row_by_a_share_of_its_own_norm():
    moved = np.linalg.norm(steered_by("norm_match", ROWS, VECTOR) - ROWS, axis=1)
    np.testing.assert_allclose(moved, NORM_SCALE * np.linalg.norm(ROWS, axis=1), rtol=1e-4)


def test_orthogonal_leaves_nothing_along_the_vector():
    assert np.abs(ROWS @ UNIT).max() > 0.1
    assert np.abs(steered_by("orthogonal", ROWS, VECTOR) @ UNIT).max() < 1e-5


def test_cap_bounds_what_lies_along_the_vector_and_nothing_else():
    large = ROWS + 5 * UNIT
    capped = steered_by("cap", large, VECTOR)
    assert (capped @ UNIT).max() <= CAP + 1e-5
    across = large - np.outer(large @ UNIT, UNIT)
    np.testing.assert_allclose(capped - np.outer(capped @ UNIT, UNIT), across, atol=1e-5)


def test_an_op_without_a_name_is_refused():
    with pytest.raises(ValueError, match="no op"):
        steered_by("swap", ROWS, VECTOR)


def test_rounding_to_bfloat16_counts_as_right_and_an_op_left_out_does_not():
    for op in OPS:
        was = ROWS + 5 * UNIT
        expected = steered_by(op, to_bfloat16(was), VECTOR)
        now = to_bfloat16(steered_by(op, was, VECTOR))
        assert share_right(to_bfloat16(was), now, expected) > 0.99, op
        assert share_right(to_bfloat16(was), to_bfloat16(was), expected) < 0.7, op


def test_a_turn_survives_its_way_to_another_process():
    turn = Turn("both", round=3, steered=(1, 2), captured=(2,), mixed=True, distinct=4)
    assert turn_from_line(turn_to_line(turn)) == turn


def test_requests_of_a_mixed_turn_take_turns_in_the_ops():
    turn = Turn("mixed", steered=(0, 7), captured=(0, 7), mixed=True)
    specs = [spec_of(turn, request, [5, 6], Load()) for request in range(len(OPS))]
    ops = [spec.interventions[0] for spec in specs]
    assert [item.op for item in ops] == [Op.add, Op.add, Op.orthogonal, Op.cap]
    assert [item.norm_match for item in ops] == [False, True, False, False]
    assert all([item.layer for item in spec.interventions] == [0, 7] for spec in specs)
    assert not any(item.changes_nothing for spec in specs for item in spec.interventions)


def test_distinct_says_how_many_vectors_the_requests_share():
    turn = Turn("distinct", steered=(0,), distinct=3)
    names = [spec_of(turn, n, [5], Load()).interventions[0].vector for n in range(9)]
    assert len(set(names)) == 3
    own = dataclasses.replace(turn, distinct=0)
    assert len({spec_of(own, n, [5], Load()).interventions[0].vector for n in range(9)}) == 9


def test_rounds_have_prompts_of_their_own_which_every_side_draws_alike():
    load = Load(requests=4, prompt=8)
    assert prompts(load, 1) == prompts(load, 1)
    assert prompts(load, 1) != prompts(load, 2)
