"""A request's ops as segments: at layer L, positions [start, end), this row times this scale.

Everything is resolved when the request arrives. A step only cuts the segments to the positions
that it runs. Ops that change nothing (scale 0, a zero row) never become segments, so that such a
request takes exactly the way of an unsteered one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from worker.steering.bank import Block, BlockKey, VectorBank

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker.steering.carrier import AddOp

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float32]

FOREVER = np.iinfo(np.int64).max


class Segments(NamedTuple):
    """Equal-length columns: where, and what is added there."""

    layer: Ints
    start: Ints
    end: Ints
    place: Ints
    scale: Floats
    norm: npt.NDArray[np.bool_]

    def take(self, chosen: npt.NDArray[np.int64]) -> Segments:
        """Return the chosen segments, in the order chosen."""
        return Segments(
            self.layer[chosen],
            self.start[chosen],
            self.end[chosen],
            self.place[chosen],
            self.scale[chosen],
            self.norm[chosen],
        )


def join(parts: Sequence[Segments]) -> Segments:
    """Put segments one after the other."""
    return Segments(
        np.concatenate([np.zeros(0, np.int64), *(part.layer for part in parts)]),
        np.concatenate([np.zeros(0, np.int64), *(part.start for part in parts)]),
        np.concatenate([np.zeros(0, np.int64), *(part.end for part in parts)]),
        np.concatenate([np.zeros(0, np.int64), *(part.place for part in parts)]),
        np.concatenate([np.zeros(0, np.float32), *(part.scale for part in parts)]),
        np.concatenate([np.zeros(0, np.bool_), *(part.norm for part in parts)]),
    )


@dataclass(frozen=True, slots=True)
class Program:
    """A request's segments and the blocks they use.

    `always`: every segment covers all positions. `overlaps`: some position of some layer has more
    than one segment. `bounds`: the sorted positions at which the set of active segments changes.
    """

    segments: Segments
    keys: tuple[BlockKey, ...]
    bounds: Ints
    always: bool
    overlaps: bool

    @property
    def empty(self) -> bool:
        """Whether the request is steered nowhere."""
        return len(self.segments.layer) == 0

    def cut(self, start: int, end: int) -> Segments:
        """Return the segments that touch positions [start, end), cut to that range."""
        whole = self.segments
        if not self.always:
            whole = whole.take(np.flatnonzero((whole.start < end) & (whole.end > start)))
        return whole._replace(start=np.maximum(whole.start, start), end=np.minimum(whole.end, end))

    def next_change(self, position: int) -> int:
        """Return the first position after `position` whose active segments may differ."""
        index = int(np.searchsorted(self.bounds, position, side="right"))
        return int(self.bounds[index]) if index < len(self.bounds) else FOREVER


def build_program(ops: Sequence[AddOp], bank: VectorBank, n_layers: int) -> Program:
    """Resolve ops against the bank, whose blocks the program then holds until `drop_program`.

    Raises what `VectorBank.acquire` raises, and ValueError for a layer or a position that cannot
    be; no block is held then.
    """
    keys: list[BlockKey] = []
    parts: list[Segments] = []
    try:
        for op in ops:
            if not 0 <= op.layer < n_layers:
                msg = f"there is no Layer {op.layer}: the model has {n_layers}"
                raise ValueError(msg)
            count = 1 if op.positions is None else len(op.positions)
            key = BlockKey(op.vector, op.row, count, op.norm_match)
            block = bank.acquire(key)
            keys.append(key)
            parts.append(_segments(op, block))
    except Exception:
        for key in keys:
            bank.release(key)
        raise
    return _assemble(parts, tuple(keys))


def drop_program(program: Program, bank: VectorBank) -> None:
    """Give the blocks of a program back."""
    for key in program.keys:
        bank.release(key)


def _segments(op: AddOp, block: Block) -> Segments:
    if op.positions is not None:
        start = np.array(op.positions, dtype=np.int64)
        end, which = start + 1, np.arange(len(start))
    elif op.spans is not None:
        ranges = np.array(op.spans, dtype=np.int64).reshape(-1, 2)
        start, end = ranges[:, 0], ranges[:, 1]
        which = np.zeros(len(start), dtype=np.int64)
    else:
        start, end, which = np.zeros(1, np.int64), np.array([FOREVER]), np.zeros(1, np.int64)
    if (start < 0).any() or (end <= start).any():
        msg = "a position is negative or a span is empty"
        raise ValueError(msg)
    # Zero rows, and products that underflow float32 to zero, are no ops at all.
    moves = block.peaks[which] > 0
    if not op.norm_match:
        # A product beyond float32 is infinite here and makes its rows misfits, step by step.
        with np.errstate(over="ignore"):
            moves &= np.float32(op.scale) * block.peaks[which].astype(np.float32) != 0
    size = int(moves.sum())
    return Segments(
        layer=np.full(size, op.layer, dtype=np.int64),
        start=start[moves],
        end=end[moves],
        place=block.places[which[moves]],
        scale=np.full(size, op.scale, dtype=np.float32),
        norm=np.full(size, op.norm_match, dtype=np.bool_),
    )


def _assemble(parts: list[Segments], keys: tuple[BlockKey, ...]) -> Program:
    joined = join(parts)
    segments = joined.take(np.argsort(joined.layer, kind="stable"))
    edges = np.concatenate([segments.start, segments.end])
    by_start = np.lexsort((segments.start, segments.layer))
    layer, start, end = (
        column[by_start] for column in (segments.layer, segments.start, segments.end)
    )
    touching = (layer[1:] == layer[:-1]) & (start[1:] < end[:-1])
    return Program(
        segments=segments,
        keys=keys,
        bounds=np.unique(edges[(edges > 0) & (edges < FOREVER)]),
        always=bool((segments.start == 0).all() and (segments.end == FOREVER).all()),
        overlaps=bool(touching.any()),
    )
