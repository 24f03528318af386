"""Spans against Python's sets: every operation, on anything that a user could mean."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from app.completions import spans
from app.steering.spec import FOREVER, Spans

UNIVERSE = 40
RANGES = st.lists(st.tuples(st.integers(0, UNIVERSE), st.integers(0, UNIVERSE)), max_size=8)
# Some sets are open at their end.
SETS = st.builds(
    lambda ranges, start: spans.of_ranges([*ranges, *([] if start is None else [start])]),
    RANGES,
    st.none() | st.tuples(st.integers(0, UNIVERSE), st.just(FOREVER)),
)


def members(found: Spans) -> set[int]:
    """List the positions of a set up to one past the universe, which stands for the open end."""
    return {position for position in range(UNIVERSE + 2) if spans.holds(found, position)}


def is_canonical(found: Spans) -> bool:
    return all(start < end for start, end in found) and all(
        before[1] < after[0] for before, after in pairwise(found)
    )


@settings(deadline=None)
@given(RANGES)
def test_ranges_in_any_order_become_one_canonical_set(ranges: list[tuple[int, int]]) -> None:
    found = spans.of_ranges(ranges)
    assert is_canonical(found)
    assert members(found) == {p for start, end in ranges for p in range(start, end)}
    assert spans.count(found) == len(members(found))


@settings(deadline=None)
@given(st.lists(st.integers(0, UNIVERSE)))
def test_positions_become_the_same_set(positions: list[int]) -> None:
    found = spans.of_positions(positions)
    assert is_canonical(found)
    assert members(found) == set(positions)


@settings(deadline=None)
@given(SETS, SETS)
def test_union_intersection_and_difference_are_those_of_sets(left: Spans, right: Spans) -> None:
    one, other = members(left), members(right)
    for found, expected in (
        (spans.unite(left, right), one | other),
        (spans.intersect(left, right), one & other),
        (spans.subtract(left, right), one - other),
    ):
        assert is_canonical(found)
        assert members(found) == expected


@settings(deadline=None)
@given(SETS)
def test_a_set_less_itself_is_empty_and_less_nothing_is_itself(whole: Spans) -> None:
    assert spans.subtract(whole, whole) == ()
    assert spans.subtract(whole, ()) == whole
    assert spans.intersect(whole, spans.EVERYWHERE) == whole
    assert spans.unite(whole, ()) == whole
