"""What bodies refer to: stored vectors by name, and captured rows of Jobs.

Only names are collected, so that all of them can be read at once; what is malformed, and lists
that are longer than any rule allows, are left out here and refused by the validator. The
references of a Completion are looked up when a rule first asks for one of them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

from app.completions.captures import CAPTURES_MAX
from app.completions.problems import RefusedError
from app.completions.rows_of import RowsOf, read_positions, read_rows_of
from app.settings import Limits
from app.steering.vectors import Vector, digest_of

Key = TypeVar("Key")
Value = TypeVar("Value")
Body: TypeAlias = Mapping[str, Any]
# Reads captured rows for an account: each reference's rows, or why there are none.
ReadCaptured: TypeAlias = Callable[[UUID, Collection[RowsOf]], Mapping[RowsOf, Vector | str]]


class LookedUp(Mapping[Key, Value]):
    """What references name, found when it is first looked at, so that earlier rules come first.

    Looking raises what `find` raises; it is asked about nothing at all when nothing is named.
    """

    def __init__(
        self,
        collect: Callable[[], Collection[Key]],
        find: Callable[[Collection[Key]], Mapping[Key, Value]],
    ) -> None:
        """Collect references by `collect` and find them by `find`, both later and once."""
        self._collect = collect
        self._find = find

    @cached_property
    def _found(self) -> Mapping[Key, Value]:
        references = self._collect()
        return self._find(references) if references else {}

    def __getitem__(self, key: Key) -> Value:
        """Give what a reference names."""
        return self._found[key]

    def __iter__(self) -> Iterator[Key]:
        """Go through the references that name something."""
        return iter(self._found)

    def __len__(self) -> int:
        """Count them."""
        return len(self._found)


def vectors_of(
    body: Body, limits: Limits, find: Callable[[Collection[str]], Mapping[str, Vector]]
) -> Mapping[str, Vector]:
    """Give the stored vectors that a Completion names, found by `find` once a rule asks."""
    return LookedUp(lambda: named_vectors([body], limits), find)


def captured_of(
    body: Body,
    limits: Limits,
    read: Callable[[Collection[RowsOf]], Mapping[RowsOf, Vector | str]],
) -> Mapping[RowsOf, Vector | str]:
    """Give the rows that a Completion copies, read by `read` once a rule asks."""
    return LookedUp(lambda: wanted_rows([body], limits), read)


def named_vectors(bodies: Iterable[Body], limits: Limits) -> set[str]:
    """Collect the names of stored vectors that bodies use."""
    names: set[str] = set()
    for body in bodies:
        steers = _objects(body, "apply_steering_vectors", limits.vectors_per_request)
        for item in (*steers, *_interventions(body, limits)):
            names.update(_names(item.get("vector"), 1))
            names.update(_names(item.get("vectors"), limits.placed_interventions))
        for item in _objects(body, "captures", CAPTURES_MAX):
            reduce = item.get("reduce")
            if isinstance(reduce, dict):
                names.update(_names(reduce.get("project"), limits.capture_directions))
    return names


def wanted_rows(bodies: Iterable[Body], limits: Limits) -> set[RowsOf]:
    """Collect the captured rows that bodies copy."""
    wanted: set[RowsOf] = set()
    for body in bodies:
        for item in _interventions(body, limits):
            sent = item.get("from")
            if sent is not None:
                try:
                    positions = _positions(item.get("at"))
                    chars_max = limits.custom_id_chars
                    wanted.add(read_rows_of(sent, positions, custom_id_chars=chars_max))
                except RefusedError:
                    continue
    return wanted


def _interventions(body: Body, limits: Limits) -> list[dict[str, Any]]:
    return _objects(body, "interventions", limits.interventions_per_request)


def _objects(body: Body, field: str, most: int) -> list[dict[str, Any]]:
    """Give the objects of a list, none of one that is too long: nothing of it will be used."""
    items = body.get(field)
    if not isinstance(items, list) or len(items) > most:
        return []
    return [item for item in items if isinstance(item, dict)]


def _names(sent: Any, most: int) -> Iterator[str]:
    items = sent if isinstance(sent, list) else (sent,)
    if len(items) > most or (items and isinstance(items[0], int | float)):
        return  # too many to be used, or the numbers of a vector: there may be millions
    for item in items:
        if isinstance(item, str) and digest_of(item) is not None:
            yield item


def _positions(at: Any) -> tuple[int, ...] | None:
    positions = at.get("positions") if isinstance(at, dict) else None
    return None if positions is None else read_positions(positions)
