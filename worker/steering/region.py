"""Where captured rows go: one mapped file a capture, each row at the place of its position.

    [written  uint8  [layers, rows]] [padding to 64] [data  dtype  [layers, rows, width]]

A row that is computed twice (preemption, an extra step) lands on itself; `written` is the
completeness bitmap. The file's blocks are reserved when it is made, so that a full disk fails
one request there and not the engine at a write.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from app.steering.spec import Capture, Reduce

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

# bfloat16 has no numpy type: its bits travel as uint16.
STORED_AS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.float32}
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}


@dataclass(frozen=True, slots=True)
class RegionShape:
    """What both sides must agree on: how many layers and rows, their width and dtype name."""

    layers: int
    rows: int
    width: int
    dtype: str

    @property
    def data_offset(self) -> int:
        """Byte at which the rows begin."""
        return -(-self.layers * self.rows // 64) * 64

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        item = np.dtype(STORED_AS[self.dtype]).itemsize
        return self.data_offset + self.layers * self.rows * self.width * item


def region_shape(capture: Capture, rows: int, site_width: int, dtype: str) -> RegionShape:
    """Say what the region of a capture holds: the mean is taken from all its rows at the end."""
    reduced = capture.reduce in (Reduce.norm, Reduce.project)
    return RegionShape(
        layers=len(capture.layers),
        rows=rows,
        width=capture.width(site_width),
        dtype="float32" if reduced else dtype,
    )


class CaptureRegion:
    """One capture's rows: `data` [layers, rows, width] and `written` [layers, rows]."""

    def __init__(self, path: Path, shape: RegionShape) -> None:
        """Map an existing region."""
        self.path = path
        self.shape = shape
        raw = np.memmap(path, dtype=np.uint8, mode="r+", shape=(shape.size,))
        count = shape.layers * shape.rows
        self.written: npt.NDArray[np.uint8] = raw[:count].reshape(shape.layers, shape.rows)
        self.data: npt.NDArray[np.uint16] | npt.NDArray[np.float32] = (
            raw[shape.data_offset :]
            .view(STORED_AS[shape.dtype])
            .reshape(shape.layers, shape.rows, shape.width)
        )

    @classmethod
    def create(cls, path: Path, shape: RegionShape) -> CaptureRegion:
        """Make the file with its space reserved; raise OSError when the disk is full."""
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, shape.size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return cls(path, shape)

    def complete(self, rows: int) -> bool:
        """Say whether every layer has its first `rows` rows, and room for them."""
        return rows <= self.shape.rows and bool(self.written[:, :rows].all())

    def finite(self, rows: int) -> bool:
        """Say whether the first `rows` rows of every layer hold finite numbers only."""
        exponent = _EXPONENT.get(self.shape.dtype)
        for layer in self.data[:, :rows]:
            if exponent is None:
                fine = bool(np.isfinite(layer.astype(np.float32, copy=False)).all())
            else:
                fine = not bool(((layer.view(np.uint16) & exponent) == exponent).any())
            if not fine:
                return False
        return True
