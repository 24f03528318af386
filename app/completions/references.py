"""What bodies refer to: stored vectors by name, and captured rows of Jobs.

Only names are collected, so that all of them can be read at once before validation; what is
malformed is left out here and refused by the validator.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias
from uuid import UUID

from app.completions.problems import RefusedError
from app.completions.rows_of import RowsOf, read_positions, read_rows_of
from app.steering.vectors import Vector, digest_of

Body: TypeAlias = Mapping[str, Any]
# Reads captured rows for an account: each reference's rows, or why there are none.
ReadCaptured: TypeAlias = Callable[[UUID, Collection[RowsOf]], Mapping[RowsOf, Vector | str]]


def named_vectors(bodies: Iterable[Body]) -> set[str]:
    """Collect the names of stored vectors that bodies use."""
    names: set[str] = set()
    for body in bodies:
        for item in (*_objects(body, "apply_steering_vectors"), *_objects(body, "interventions")):
            names.update(_names(item.get("vector")))
            names.update(_names(item.get("vectors")))
        for item in _objects(body, "captures"):
            reduce = item.get("reduce")
            if isinstance(reduce, dict):
                names.update(_names(reduce.get("project")))
    return names


def wanted_rows(bodies: Iterable[Body]) -> set[RowsOf]:
    """Collect the captured rows that bodies copy."""
    wanted: set[RowsOf] = set()
    for body in bodies:
        for item in _objects(body, "interventions"):
            sent = item.get("from")
            if sent is not None:
                try:
                    wanted.add(read_rows_of(sent, _positions(item.get("at"))))
                except RefusedError:
                    continue
    return wanted


def _objects(body: Body, field: str) -> list[dict[str, Any]]:
    items = body.get(field)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _names(sent: Any) -> Iterator[str]:
    items = sent if isinstance(sent, list) else (sent,)
    if items and isinstance(items[0], int | float):
        return  # the numbers of a vector: there may be millions
    for item in items:
        if isinstance(item, str) and digest_of(item) is not None:
            yield item


def _positions(at: Any) -> tuple[int, ...] | None:
    positions = at.get("positions") if isinstance(at, dict) else None
    return None if positions is None else read_positions(positions)
