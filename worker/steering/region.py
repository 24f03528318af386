"""Where captured rows go: one mapped file a capture, each row at the place of its position.

    [written  uint8  [rows, layers]] [padding to 64] [data  dtype  [rows, layers, width]]

All layers of a position lie together, because a step computes them together. A row that is
computed twice (preemption, an extra step) lands on itself; `written` is the
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
    from io import FileIO
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
    def row_bytes(self) -> int:
        """Bytes of one row of all layers."""
        return self.layers * self.width * np.dtype(STORED_AS[self.dtype]).itemsize

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + self.rows * self.row_bytes


def region_shape(capture: Capture, rows: int, site_width: int, dtype: str) -> RegionShape:
    """Say what the region of a capture holds: the mean is taken from all its rows at the end."""
    reduced = capture.reduce in (Reduce.norm, Reduce.project)
    return RegionShape(
        layers=len(capture.layers),
        rows=rows,
        width=capture.width(site_width),
        dtype="float32" if reduced else dtype,
    )


class RegionWriter:
    """The engine's side of a region: puts rows to their places.

    By plain writes: they cost a third of the page faults that writing to mapped memory costs, and
    a full disk is an error of this write instead of a signal to the process.
    """

    def __init__(self, path: Path, shape: RegionShape) -> None:
        """Open an existing region."""
        self.shape = shape
        self._stride = shape.row_bytes
        self._file = path.open("r+b", buffering=0)
        try:
            # By the open file: an aborted request's region may be deleted at any moment.
            self._written = _bitmap(self._file, shape)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; nothing can be written any more."""
        self._file.close()

    def put(self, rows: npt.NDArray[np.generic], row: int, layer: int = 0) -> None:
        """Write rows [n, layers, width] from `row` on; what has no place is left out.

        They are of all layers of the region, or of some that follow each other from `layer` on.
        Raises OSError when the disk is full.
        """
        end = min(row + len(rows), self.shape.rows)
        if end <= row:
            return
        content = np.ascontiguousarray(rows[: end - row], dtype=STORED_AS[self.shape.dtype])
        offset = self.shape.data_offset + row * self._stride
        if content.shape[1] == self.shape.layers:
            self._write(content, offset)
        else:
            offset += layer * (self._stride // self.shape.layers)
            for number, one in enumerate(content):
                self._write(one, offset + number * self._stride)
        self._written[layer : layer + content.shape[1], row:end] = 1

    def _write(self, content: npt.NDArray[np.generic], offset: int) -> None:
        left = content.data.cast("B")
        while left:
            count = os.pwrite(self._file.fileno(), left, offset)
            left, offset = left[count:], offset + count


def _bitmap(file: Path | FileIO, shape: RegionShape) -> npt.NDArray[np.uint8]:
    """Map the completeness bitmap of a region, [layers, rows]."""
    # asarray: each slice of a memmap object costs as much as the copy of a row.
    raw = np.asarray(np.memmap(file, dtype=np.uint8, mode="r+", shape=(shape.rows, shape.layers)))
    return raw.T


class CaptureRegion:
    """One capture's rows: `data` [layers, rows, width] and `written` [layers, rows]."""

    def __init__(self, path: Path, shape: RegionShape) -> None:
        """Map an existing region."""
        self.path = path
        self.shape = shape
        self.written = _bitmap(path, shape)
        raw = np.memmap(path, dtype=np.uint8, mode="r+", shape=(shape.size,))
        self.data: npt.NDArray[np.uint16] | npt.NDArray[np.float32] = (
            np.asarray(raw)[shape.data_offset :]
            .view(STORED_AS[shape.dtype])
            .reshape(shape.rows, shape.layers, shape.width)
            .transpose(1, 0, 2)
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
