"""Running statistics of captured values: count, mean, squared deviations, sum of norms.

Values are what the files hold: whole vectors, means of them, norms (vectors of one number), or
projections.

Sums are float64, taken of differences from the first vector seen: residual streams have numbers
whose mean is thousands of times their spread, where plain sums of squares would lose it. The
first position of each request is left out by the caller's mask (its norm is often 200 times the
others'). Moments of parts are merged in order of their first index, so the result of a Job is
the same whoever merges it.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from app.results.schema import MOMENTS, STATS

BLOCK_BYTES = 1024**2  # of float64: a block stays in the processor's second cache

Rows = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]


class RunningMoments:
    """Moments of the vectors seen so far; every vector has `width` numbers."""

    def __init__(self, width: int) -> None:
        """Start with no vector."""
        self.count = 0
        self.norm_sum = 0.0
        self._shift: Vector | None = None
        self._sum: Vector = np.zeros(width)
        self._square_sum: Vector = np.zeros(width)
        self._block_rows = max(1, BLOCK_BYTES // (8 * width))

    def add(self, rows: Rows, counted: npt.NDArray[np.bool_]) -> None:
        """Take in the `rows` [n, width] for which `counted` [n] is true."""
        if not counted.any():
            return
        if self._shift is None:
            self._shift = rows[int(np.argmax(counted))].astype(np.float64)
        # Not kept: a part may have hundreds of files, each with moments of its own.
        room: Vector = np.empty((min(self._block_rows, len(rows)), rows.shape[1]))
        for start in range(0, len(rows), self._block_rows):
            block = room[: len(rows) - start]
            np.copyto(block, rows[start : start + self._block_rows])
            self._add_block(block, counted[start : start + self._block_rows], self._shift)

    def _add_block(self, block: Vector, counted: npt.NDArray[np.bool_], shift: Vector) -> None:
        squares = np.einsum("ij,ij->i", block, block)
        self.norm_sum += float(np.sqrt(squares[counted]).sum())
        self.count += int(counted.sum())
        block -= shift
        block[~counted] = 0.0
        self._sum += block.sum(axis=0)
        self._square_sum += np.einsum("ij,ij->j", block, block)

    @property
    def mean(self) -> Vector:
        """Mean of each number, [width]."""
        if self._shift is None:
            return self._sum.copy()
        mean: Vector = self._shift + self._sum / self.count
        return mean

    @property
    def m2(self) -> Vector:
        """Sum of squared deviations from the mean of each number, [width]."""
        if not self.count:
            return self._square_sum.copy()
        m2: Vector = np.maximum(self._square_sum - self._sum**2 / self.count, 0.0)
        return m2


def moments_table(moments: Mapping[tuple[str, int], RunningMoments]) -> pa.Table:
    """Write moments by (capture, layer) as the rows of a part's moments file."""
    rows = [
        {
            "capture": capture,
            "layer": layer,
            "count": item.count,
            "mean": item.mean,
            "m2": item.m2,
            "norm_sum": item.norm_sum,
        }
        for (capture, layer), item in sorted(moments.items())
        if item.count
    ]
    return pa.Table.from_pylist(rows, schema=MOMENTS)


def merged_stats(tables: Iterable[pa.Table]) -> pa.Table:
    """Merge moments of parts, in the order given, into the rows of stats.parquet.

    std is over all vectors (divided by count, not by count - 1).
    """
    # Width is in the key so that a Job whose parts disagree, which intake refuses, still ends.
    merged: dict[tuple[str, int, int], dict[str, Any]] = {}
    for table in tables:
        for row in table.to_pylist():
            row["mean"] = np.asarray(row["mean"])
            row["m2"] = np.asarray(row["m2"])
            key = (row["capture"], row["layer"], len(row["mean"]))
            merged[key] = _merge(merged[key], row) if key in merged else row
    rows = [
        {
            "capture": capture,
            "layer": layer,
            "count": row["count"],
            "mean": row["mean"],
            "std": np.sqrt(row["m2"] / row["count"]),
            "mean_norm": row["norm_sum"] / row["count"],
        }
        for (capture, layer, _), row in sorted(merged.items())
    ]
    return pa.Table.from_pylist(rows, schema=STATS)


def _merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Add the moments of two disjoint sets of vectors (Chan, Golub and LeVeque 1979)."""
    count = a["count"] + b["count"]
    delta = b["mean"] - a["mean"]
    return {
        **a,
        "count": count,
        "mean": a["mean"] + delta * (b["count"] / count),
        "m2": a["m2"] + b["m2"] + delta**2 * (a["count"] * b["count"] / count),
        "norm_sum": math.fsum((a["norm_sum"], b["norm_sum"])),
    }
