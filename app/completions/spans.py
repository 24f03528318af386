"""Sets of positions as spans: half-open ranges, ascending, disjoint, never touching.

Every function takes and gives sets in this one form, so that equal sets are equal values (the
prefix-cache salt compares them). An end of FOREVER is open.
"""

from collections.abc import Iterable
from typing import Final

from app.steering.spec import FOREVER, Spans

EVERYWHERE: Final[Spans] = ((0, FOREVER),)


def of_ranges(ranges: Iterable[tuple[int, int]]) -> Spans:
    """Unite half-open ranges that come in any order; those that hold nothing are left out."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if end <= start:
            continue
        if spans and start <= spans[-1][1]:
            if end > spans[-1][1]:
                spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return tuple(spans)


def of_positions(positions: Iterable[int]) -> Spans:
    """Make the set of single positions."""
    return of_ranges((position, position + 1) for position in positions)


def unite(left: Spans, right: Spans) -> Spans:
    """Give the positions that are in either set."""
    return of_ranges((*left, *right))


def intersect(left: Spans, right: Spans) -> Spans:
    """Give the positions that are in both sets."""
    shared: list[tuple[int, int]] = []
    one = other = 0
    while one < len(left) and other < len(right):
        start = max(left[one][0], right[other][0])
        end = min(left[one][1], right[other][1])
        if start < end:
            shared.append((start, end))
        if left[one][1] < right[other][1]:
            one += 1
        else:
            other += 1
    return tuple(shared)


def subtract(left: Spans, right: Spans) -> Spans:
    """Give the positions of the first set that are not in the second."""
    return intersect(left, _others(right))


def holds(spans: Spans, position: int) -> bool:
    """Whether a position is in the set."""
    return any(start <= position < end for start, end in spans)


def count(spans: Spans) -> int:
    """Count the positions of a set."""
    return sum(end - start for start, end in spans)


def _others(spans: Spans) -> Spans:
    """Give every position that is not in the set."""
    edges = [0, *(edge for span in spans for edge in span), FOREVER]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((start, end) for start, end in pairs if start < end)
