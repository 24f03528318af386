"""A request's ops as segments: at a point, positions [start, end), this row and these numbers.

Everything is resolved when the request arrives. A step only cuts the segments to the positions
that it runs. Ops that change nothing (scale 0, coeff 1, a zero row) never become segments, so
that such a request takes exactly the way of an unsteered one.

Ops of one point act in stages, one after the other; the ops of one stage see the same x. Sums
share a stage: what each adds does not depend on what the others did. So do ops at single
positions that have none in common: exclusions cut one op of the user into many such pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from app.steering.spec import FOREVER as OPEN
from app.steering.spec import Intervention, Op, Spans
from worker.steering.bank import Banks, Block, BlockKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker.steering.points import Shape

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float32]

FOREVER = np.iinfo(np.int64).max
STAGES_MAX = 64  # ops at one point and position that depend on each other
POINT_KEYS = 2 * STAGES_MAX  # keys of one point
# What an op does to x, with a, low and high from its segment, v its row and u the row at unit
# length: x + a v | x + a |x| u | x + a (x.u) u | x + (clamp(x.u, low, high) - x.u) u | v
ADD, ADD_NORM, PROJECT, CAP, REPLACE = range(5)
# Numbers that cannot carry a sum beyond float32 or bfloat16 unless the row was there already.
_TAME = 1e30
_TAME_FACTOR = 1e6
_TINY = 1e-37  # products below may underflow float32


class Segments(NamedTuple):
    """Equal-length columns. `key` orders by point, then stage, then whole rows before heads."""

    key: Ints
    start: Ints
    end: Ints
    place: Ints
    kind: Ints
    head: Ints
    a: Floats
    low: Floats
    high: Floats

    def take(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Segments:
        """Return the chosen segments, in the order chosen."""
        return Segments._make(column[chosen] for column in self)


# Segments before they are columns.
_Rows: TypeAlias = list[tuple[int, int, int, int, int, int, float, float, float]]


def _dtype(name: str) -> type[np.generic]:
    return np.float32 if name in ("a", "low", "high") else np.int64


_EMPTY = Segments._make(np.zeros(0, _dtype(name)) for name in Segments._fields)


def join(parts: Sequence[Segments]) -> Segments:
    """Put segments one after the other."""
    return Segments._make(map(np.concatenate, zip(_EMPTY, *parts, strict=True)))


def key_of(point: int, stage: int, *, by_head: bool) -> int:
    """Number a stage of a point; whole rows and heads are apart."""
    return point * POINT_KEYS + stage * 2 + by_head


@dataclass(frozen=True, slots=True)
class Program:
    """A request's segments and the blocks they use.

    `always`: every segment covers all positions. `overlaps`: some position of some stage has more
    than one segment. `bounds`: the sorted positions at which the set of active segments changes.
    `tame`: what is added is far from the limits of the number formats.
    """

    segments: Segments
    keys: tuple[BlockKey, ...]
    bounds: Ints
    always: bool
    overlaps: bool
    tame: bool

    @property
    def empty(self) -> bool:
        """Whether the request is steered nowhere."""
        return len(self.segments.key) == 0

    def cut(self, start: int, end: int) -> Segments:
        """Return the segments that touch positions [start, end), cut to that range."""
        whole = self.segments
        if not self.always:
            whole = whole.take(np.flatnonzero((whole.start < end) & (whole.end > start)))
        return whole._replace(start=np.maximum(whole.start, start), end=np.minimum(whole.end, end))

    def next_change(self, position: int) -> int:
        """Return the first position after `position` whose active segments may differ."""
        return next_after(self.bounds, position)


def next_after(bounds: Ints, position: int) -> int:
    """Return the first of sorted `bounds` after `position`, FOREVER when there is none."""
    index = int(np.searchsorted(bounds, position, side="right"))
    return int(bounds[index]) if index < len(bounds) else FOREVER


class _Stages:
    """Finds the stage of each op of one point, in their order.

    An op joins the stage of those before it when it touches none of their positions, or when it
    and all of them only add.
    """

    def __init__(self) -> None:
        self._stage = 0
        self._sums_only = True
        self._lanes: set[bool] = set()
        self._touched: list[tuple[int, int]] = []  # disjoint, ascending

    def place(self, item: Intervention) -> int:
        """Return the stage of the next op."""
        by_head, adds = item.heads is not None, item.op is Op.add
        sums = item.summed or (adds and not item.norm_match)
        ranges = _ranges(item)
        if any(map(self._touches, ranges)) and not (
            sums and self._sums_only and self._lanes == {by_head}
        ):
            self._stage += 1
            self._sums_only = True
            self._lanes, self._touched = set(), []
        self._sums_only = self._sums_only and adds
        self._lanes.add(by_head)
        for start, end in ranges:
            self._touch(start, end)
        if self._stage >= STAGES_MAX:
            msg = f"more than {STAGES_MAX} ops at Layer {item.layer} {item.site.value}"
            raise ValueError(msg)
        return self._stage

    def _touches(self, span: tuple[int, int]) -> bool:
        index = bisect_left(self._touched, (span[1],))
        return index > 0 and self._touched[index - 1][1] > span[0]

    def _touch(self, start: int, end: int) -> None:
        """Add a range to those touched, merged with what it overlaps."""
        first = bisect_left(self._touched, (start,))
        if first and self._touched[first - 1][1] > start:
            first -= 1
        last = bisect_left(self._touched, (end,))
        if first < last:
            start = min(start, self._touched[first][0])
            end = max(end, self._touched[last - 1][1])
        self._touched[first:last] = [(start, end)]


def _ranges(item: Intervention) -> Spans:
    """List the ranges of positions that an op touches; position k of `positions` is range k."""
    if item.positions is not None:
        return tuple((at, at + 1) for at in item.positions)
    return item.spans if item.spans is not None else ((0, OPEN),)


def build_program(ops: Sequence[Intervention], banks: Banks, shape: Shape) -> Program:
    """Resolve ops against the banks, whose blocks the program then holds until `drop_program`.

    Raises what `VectorBank.acquire` raises, and ValueError for a layer, site, head or position
    that cannot be; no block is held then.
    """
    keys: list[BlockKey] = []
    rows: _Rows = []
    stages: dict[int, _Stages] = {}
    tame = True
    try:
        for item in sorted(ops, key=lambda item: not item.summed):  # sums stand first
            if item.changes_nothing:
                continue
            point = shape.point(item.site, item.layer)
            stage = stages.setdefault(point, _Stages()).place(item)
            for key, head in _blocks_of(item, shape):
                block = banks.acquire(key)
                keys.append(key)
                number = key_of(point, stage, by_head=item.heads is not None)
                _segments(item, block, number, head, rows)
                tame = tame and _is_tame(item, block)
    except Exception:
        for key in keys:
            banks.release(key)
        raise
    return _assemble(rows, tuple(keys), tame=tame)


def drop_program(program: Program, banks: Banks) -> None:
    """Give the blocks of a program back."""
    for key in program.keys:
        banks.release(key)


def _blocks_of(item: Intervention, shape: Shape) -> list[tuple[BlockKey, int]]:
    """List the blocks that an op needs, one a head when it has heads, with their heads."""
    whole = shape.widths[item.site]
    rows = 1 if item.positions is None else len(item.positions)
    unit = item.op in (Op.orthogonal, Op.cap) or (item.op is Op.add and item.norm_match)
    if item.heads is None:
        return [(BlockKey(item.vector, item.row, rows, unit, whole, 0, whole), 0)]
    width = whole // shape.n_heads
    wrong = next((head for head in item.heads if not 0 <= head < shape.n_heads), None)
    if wrong is not None:
        msg = f"there is no head {wrong}: the model has {shape.n_heads}"
        raise ValueError(msg)
    return [
        (BlockKey(item.vector, item.row, rows, unit, whole, head * width, width), head)
        for head in item.heads
    ]


def _is_tame(item: Intervention, block: Block) -> bool:
    match item.op:
        case Op.add if item.norm_match:
            return abs(item.scale) < _TAME_FACTOR
        case Op.add:
            return bool(abs(item.scale) * block.peaks.max() < _TAME)
        case Op.orthogonal:
            return abs(item.coeff or 0.0) < _TAME_FACTOR
        case Op.cap:  # an open end lets x.u be
            return all(abs(end or 0.0) < _TAME for end in (item.low, item.high))
        case Op.replace:
            return bool(block.peaks.max() < _TAME)


def _segments(item: Intervention, block: Block, key: int, head: int, rows: _Rows) -> None:
    """Add an op's segments to `rows`, leaving out those that move nothing.

    Plain Python for the usual one or two segments: most requests bring one for each layer.
    """
    kind, a = _kind(item)
    low = -np.inf if item.low is None else item.low
    high = np.inf if item.high is None else item.high
    places, peaks = block.places, block.peaks
    for index, (start, end) in enumerate(_ranges(item)):
        which = index if item.positions is not None else 0
        if start < 0 or end <= start:
            msg = "a position is negative or a span is empty"
            raise ValueError(msg)
        if kind != REPLACE and _vanishes(float(peaks[which]), a, kind):
            continue
        last = FOREVER if end == OPEN else end
        rows.append((key, start, last, int(places[which]), kind, head, a, low, high))


def _vanishes(peak: float, a: float, kind: int) -> bool:
    """Whether a vector is zero, or its product with a underflows float32 to zero."""
    if peak == 0:
        return True
    return kind == ADD and abs(a) * peak < _TINY and np.float32(a) * np.float32(peak) == 0


def _kind(item: Intervention) -> tuple[int, float]:
    """Return the kind of an op and its factor a."""
    if item.op is Op.add:
        return (ADD_NORM if item.norm_match else ADD), item.scale
    if item.op is Op.orthogonal:
        return PROJECT, (0.0 if item.coeff is None else item.coeff) - 1.0
    return (CAP if item.op is Op.cap else REPLACE), 0.0


def _assemble(rows: _Rows, keys: tuple[BlockKey, ...], *, tame: bool) -> Program:
    rows.sort(key=lambda row: row[0])  # stable: ops of one stage keep their order
    # A product beyond float32 is infinite here and makes its rows misfits, step by step.
    with np.errstate(over="ignore"):
        segments = (
            Segments._make(
                np.array(column, dtype=_dtype(name))
                for name, column in zip(Segments._fields, zip(*rows, strict=True), strict=True)
            )
            if rows
            else _EMPTY
        )
    edges = np.concatenate([segments.start, segments.end])
    by_start = np.lexsort((segments.start, segments.head, segments.key))
    key, head, start, end = (
        column[by_start] for column in (segments.key, segments.head, segments.start, segments.end)
    )
    touching = (key[1:] == key[:-1]) & (head[1:] == head[:-1]) & (start[1:] < end[:-1])
    return Program(
        segments=segments,
        keys=keys,
        bounds=np.unique(edges[(edges > 0) & (edges < FOREVER)]),
        always=bool((segments.start == 0).all() and (segments.end == FOREVER).all()),
        overlaps=bool(touching.any()),
        tame=tame,
    )
