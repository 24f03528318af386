"""What the steering core must do to one row, written for one row: float64, op after op.

Nothing of worker.steering is used here, so that both can only agree by being right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.steering.spec import Capture, Intervention

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class Row:
    """A row after its ops: `x`, and the largest norm that it had on the way.

    `moved`: some op acts on it and is no clamp that leaves it; `close`: a clamp was so near its
    edge that either way is right.
    """

    x: np.ndarray
    size: float
    moved: bool = False
    close: bool = False

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.x).all())


def row_of(item: Intervention, position: int) -> list[int]:
    """List the rows of the vector that an op takes at a position, one for each time it acts."""
    if item.positions is not None:
        return [item.row + place for place, at in enumerate(item.positions) if at == position]
    if item.spans is None or any(start <= position < end for start, end in item.spans):
        return [item.row]
    return []


def steer_row(
    x: np.ndarray,
    ops: Sequence[Intervention],
    position: int,
    vectors: Mapping[str, np.ndarray],
    n_heads: int,
) -> Row:
    """Do the ops of one point to the row at `position`."""
    row = Row(x.astype(np.float64), float(np.linalg.norm(x)))
    came = row.x.copy()
    ordered = [item for item in ops if item.summed] + [item for item in ops if not item.summed]
    for item in ordered:
        for number in row_of(item, position):
            vector = vectors[item.vector][number].astype(np.float64)
            for part in _parts(item, len(x), n_heads):
                _act(row, item, vector, came if item.summed else row.x, part)
            if not np.isfinite(row.x).all() or np.abs(row.x).max() > FLOAT32_MAX:
                row.x = np.where(np.abs(row.x) <= FLOAT32_MAX, row.x, np.inf)
            row.size = max(row.size, float(np.linalg.norm(row.x)))
    return row


def _parts(item: Intervention, width: int, n_heads: int) -> list[slice]:
    if item.heads is None:
        return [slice(0, width)]
    size = width // n_heads
    return [slice(head * size, (head + 1) * size) for head in item.heads]


def _act(row: Row, item: Intervention, vector: np.ndarray, normed: np.ndarray, part: slice) -> None:
    x, v = row.x[part], vector[part]
    length = float(np.sqrt(v @ v))
    if item.op == "replace":
        row.x[part] = v
        row.moved = True
        return
    if length == 0 or item.changes_nothing:
        return
    u = v / length
    if item.op == "add":
        strength = float(np.float32(item.scale)) if abs(item.scale) < FLOAT32_MAX else np.inf
        norm = float(np.linalg.norm(normed[part])) if item.norm_match else 1.0
        change = strength * norm * (u if item.norm_match else v)
    else:
        along = float(x @ u)
        if item.op == "orthogonal":
            change = (item.coeff - 1.0) * along * u
        else:
            change = _clamped(row, item, along, float(np.linalg.norm(x))) * u
    row.x[part] = x + change
    row.size = max(row.size, float(np.linalg.norm(change)))
    if item.op != "cap" or change.any():
        row.moved = True


def _clamped(row: Row, item: Intervention, along: float, size: float) -> float:
    """Return how far a clamp moves a projection."""
    low = -np.inf if item.low is None else item.low
    high = np.inf if item.high is None else item.high
    if min(abs(along - low), abs(along - high)) < 1e-5 * (size + abs(along)):
        row.close = True
    return min(max(along, low), high) - along


def reduced(rows: np.ndarray, capture: Capture, vectors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return what a capture with norm or project keeps of rows [n, width]."""
    rows = rows.astype(np.float64)
    if capture.reduce == "norm":
        return np.linalg.norm(rows, axis=1, keepdims=True)
    directions = np.stack([vectors[d.vector][d.row] for d in capture.directions])
    directions = directions.astype(np.float64)
    if capture.unit:
        lengths = np.linalg.norm(directions, axis=1, keepdims=True)
        directions = np.divide(directions, lengths, where=lengths > 0, out=directions)
    return rows @ directions.T
