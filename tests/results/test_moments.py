"""Running statistics agree with statistics of everything at once."""

import numpy as np
import pytest

from app.results.moments import RunningMoments, merged_stats, moments_table


@pytest.mark.parametrize("width", [1, 7, 300])
def test_moments_in_pieces_equal_those_of_all_rows(width: int) -> None:
    rng = np.random.default_rng(3)
    rows = (rng.standard_normal((997, width)) * 3 + 19_000).astype(np.float32)
    counted = rng.random(997) > 0.1
    moments = RunningMoments(width)
    for start in range(0, 997, 250):
        moments.add(rows[start : start + 250], counted[start : start + 250])
    exact = rows[counted].astype(np.float64)
    assert moments.count == counted.sum()
    np.testing.assert_allclose(moments.mean, exact.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.m2, exact.var(axis=0) * len(exact), rtol=1e-9)
    norms = np.linalg.norm(exact, axis=1)
    np.testing.assert_allclose(moments.norm_sum, norms.sum(), rtol=1e-12)


def test_rows_that_do_not_count_change_nothing() -> None:
    moments = RunningMoments(2)
    rows = np.array([[1e6, 1e6], [1, 2], [3, 4]], dtype=np.float32)
    moments.add(rows[:1], np.array([False]))
    assert moments.count == 0
    moments.add(rows, np.array([False, True, True]))
    assert moments.mean.tolist() == [2, 3]
    assert moments.m2.tolist() == [2, 2]


def test_merged_parts_equal_the_whole() -> None:
    rng = np.random.default_rng(4)
    parts = [rng.standard_normal((size, 5)).astype(np.float32) for size in (1, 40, 300)]
    tables = []
    for rows in parts:
        moments = RunningMoments(5)
        moments.add(rows, np.ones(len(rows), dtype=np.bool_))
        tables.append(moments_table({("residual_stream", 3): moments}))
    stats = merged_stats(tables)
    whole = np.concatenate(parts).astype(np.float64)
    (row,) = stats.to_pylist()
    assert (row["capture"], row["layer"], row["count"]) == ("residual_stream", 3, 341)
    np.testing.assert_allclose(row["mean"], whole.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(row["std"], whole.std(axis=0), rtol=1e-12)
    np.testing.assert_allclose(row["mean_norm"], np.linalg.norm(whole, axis=1).mean(), rtol=1e-12)


def test_layers_and_captures_are_kept_apart_and_empty_ones_left_out() -> None:
    one, two, empty = RunningMoments(1), RunningMoments(2), RunningMoments(2)
    one.add(np.ones((1, 1), dtype=np.float32), np.array([True]))
    two.add(np.zeros((4, 2), dtype=np.float32), np.ones(4, dtype=np.bool_))
    table = moments_table({("b", 2): one, ("a", 9): two, ("a", 1): empty})
    rows = merged_stats([table, table]).to_pylist()
    assert [(row["capture"], row["layer"], row["count"]) for row in rows] == [
        ("a", 9, 8), ("b", 2, 2),
    ]  # fmt: skip
    assert rows[1]["mean"] == [1.0]
