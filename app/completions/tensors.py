"""Turns the numbers of a Steering vector into a Vector, spending no more memory than allowed.

Two forms: nested lists of JSON numbers, and {data, dtype, original_dtype, shape, compression}
with base64 of one zstd frame. The shape is read first and says how many bytes there may be; the
frame must state exactly that size before a byte of it is decompressed (zstandard ignores
max_output_size when the frame states a size: 8 KB were seen to become 256 MiB).
"""

import binascii
import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import zstandard

from app.completions.problems import RefusedError, is_int, is_number, shown, unknown_field
from app.steering.vectors import ITEM_BYTES, Vector

ENCODED_FIELDS = frozenset({"data", "dtype", "original_dtype", "shape", "compression"})
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# The largest vector is 8 MiB, and a window never has to be larger than the content.
WINDOW_BYTES_MAX = 8 * 1024**2
# (dtype, original_dtype) of the wire -> dtype of the stored vector.
WIRE_DTYPES = {
    ("float32", "torch.float32"): "float32",
    ("int16", "torch.bfloat16"): "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """How many rows, positions (None: one vector a row) and numbers a vector there are."""

    rows: int
    positions: int | None
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole: [rows, width] or [rows, positions, width]."""
        if self.positions is None:
            return (self.rows, self.width)
        return (self.rows, self.positions, self.width)

    @property
    def count(self) -> int:
        """How many numbers there are in all."""
        return math.prod(self.shape)


def count_numbers(activations: object) -> int:
    """Count the numbers of nested lists that may be ragged; 0 for what cannot be counted."""
    if not isinstance(activations, list):
        return 0
    total = 0
    for row in activations:
        if isinstance(row, list) and row and isinstance(row[0], list):
            total += sum(len(vector) for vector in row if isinstance(vector, list))
        elif isinstance(row, list):
            total += len(row)
    return total


def measure_numbers(activations: object) -> Measured:
    """Measure nested lists of numbers. Raises RefusedError when they are ragged or no numbers."""
    if not isinstance(activations, list) or not all(isinstance(r, list) for r in activations):
        msg = "must be a list with one row a layer, each a list of numbers or of vectors"
        raise RefusedError(msg)
    if not activations or not all(activations):
        msg = "has no row" if not activations else "has an empty row"
        raise RefusedError(msg)
    kinds = set(map(type, chain.from_iterable(activations)))
    if kinds <= {int, float}:
        lengths = {len(row) for row in activations}
        if len(lengths) > 1:
            msg = f"has rows of different lengths ({_some(lengths)} numbers)"
            raise RefusedError(msg)
        return Measured(len(activations), None, lengths.pop())
    if kinds != {list}:
        msg = "must hold numbers only: each row is a list of numbers or a list of vectors"
        raise RefusedError(msg)
    counts = {len(row) for row in activations}
    if len(counts) > 1:
        msg = f"has rows of different lengths ({_some(counts)} vectors)"
        raise RefusedError(msg)
    widths = set(map(len, chain.from_iterable(activations)))
    if len(widths) > 1:
        msg = f"has vectors of different lengths ({_some(widths)} numbers)"
        raise RefusedError(msg)
    inner = set(map(type, chain.from_iterable(chain.from_iterable(activations))))
    if not inner or not inner <= {int, float}:
        msg = "must hold numbers only, at most one list of vectors deep"
        raise RefusedError(msg)
    return Measured(len(activations), counts.pop(), widths.pop())


def read_numbers(activations: list[Any], measured: Measured) -> Vector:
    """Convert measured lists to float32. Raises RefusedError for a number out of its range."""
    flat = chain.from_iterable(activations)
    if measured.positions is not None:
        flat = chain.from_iterable(flat)
    values = np.fromiter(flat, dtype=np.float64, count=measured.count)
    with np.errstate(over="ignore"):
        narrow = values.astype("<f4")
    if not np.isfinite(narrow).all():
        worst = float(values[np.flatnonzero(~np.isfinite(narrow))[0]])
        msg = (
            f"holds {worst!r}, which is outside the range of float32 "
            "(-3.4028235e+38 to 3.4028235e+38)"
        )
        raise RefusedError(msg)
    return Vector("float32", measured.shape, narrow.tobytes())


def measure_encoded(encoded: dict[str, Any]) -> Measured:
    """Read the shape of an encoded vector. Raises RefusedError when it has no usable one."""
    shape = encoded.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) not in (2, 3)
        or not all(is_int(size) and 0 < size < 2**31 for size in shape)
    ):
        msg = (
            "has the shape " + shown(shape) + "; it must be [layers, hidden size] or "
            "[layers, positions, hidden size], all positive"
        )
        raise RefusedError(msg)
    return Measured(shape[0], shape[1] if len(shape) == 3 else None, shape[-1])


def read_encoded(encoded: dict[str, Any], measured: Measured) -> Vector:
    """Decode an encoded vector of a known, allowed size. Raises RefusedError."""
    for name in encoded:
        if name not in ENCODED_FIELDS:
            raise RefusedError(": " + unknown_field(name, ENCODED_FIELDS, of="An encoded vector"))
    dtype = _wire_dtype(encoded)
    if encoded.get("compression") != "zstd":
        msg = f'has compression {shown(encoded.get("compression"))}; it must be "zstd"'
        raise RefusedError(msg)
    data = _decode_base64(encoded.get("data"))
    raw = decompress_exactly(data, measured.count * ITEM_BYTES[dtype])
    vector = Vector(dtype, measured.shape, raw)
    if not math.isfinite(vector.largest):
        msg = "holds a number that is not finite (NaN or Infinity)"
        raise RefusedError(msg)
    return vector


def decompress_exactly(frame: bytes, size: int) -> bytes:
    """Decompress one zstd frame that states `size` bytes and holds exactly that many.

    Raises RefusedError for anything else, before memory is spent on it.
    """
    if not frame.startswith(ZSTD_MAGIC):
        msg = "has data that is not a zstd frame"
        raise RefusedError(msg)
    try:
        facts = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError:
        msg = "has data whose zstd frame is damaged"
        raise RefusedError(msg) from None
    if facts.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        msg = "has a zstd frame that does not state its size; compress the bytes in one call"
        raise RefusedError(msg)
    if facts.content_size != size:
        msg = f"has data of {facts.content_size} bytes, but its shape and dtype need {size}"
        raise RefusedError(msg)
    if facts.window_size > WINDOW_BYTES_MAX or facts.dict_id:
        msg = f"needs a dictionary or a zstd window over {WINDOW_BYTES_MAX} bytes"
        raise RefusedError(msg)
    try:
        raw = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).decompress(
            frame, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError:
        msg = "has data that is not exactly one whole zstd frame"
        raise RefusedError(msg) from None
    if len(raw) != size:
        msg = f"has data of {len(raw)} bytes, but its shape and dtype need {size}"
        raise RefusedError(msg)
    return raw


def finite_scale(scale: object) -> float:
    """Read a scale. Raises RefusedError when it is no number that is finite as float32."""
    if not is_number(scale):
        msg = f"has the scale {shown(scale)}; it must be a number"
        raise RefusedError(msg)
    value = float(scale)  # type: ignore[arg-type]
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(value)):
            msg = f"has the scale {value!r}, which is outside the range of float32"
            raise RefusedError(msg)
    return value


def refuse_overflow(vector: Vector, scale: float) -> None:
    """Raise RefusedError when scale x number is not finite as float32 for some number."""
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(scale * vector.largest)):
            msg = (
                f"has the scale {scale!r} and a number of size {vector.largest!r}: their product "
                "is outside the range of float32"
            )
            raise RefusedError(msg)


def _wire_dtype(encoded: dict[str, Any]) -> str:
    sent, original = encoded.get("dtype"), encoded.get("original_dtype")
    if sent == "float32" and "original_dtype" not in encoded:
        return "float32"
    dtype = None
    if isinstance(sent, str) and isinstance(original, str):
        dtype = WIRE_DTYPES.get((sent, original))
    if dtype is None:
        msg = (
            f"has dtype {shown(sent)} and original_dtype {shown(original)}; allowed are "
            '"float32" with "torch.float32", and "int16" with "torch.bfloat16"'
        )
        raise RefusedError(msg)
    return dtype


def _decode_base64(data: object) -> bytes:
    if not isinstance(data, str):
        msg = f"has data {shown(data)}; it must be a string of base64"
        raise RefusedError(msg)
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError:  # binascii.Error, and non-ASCII text
        msg = "has data that is not base64 (standard alphabet, padded, without line breaks)"
        raise RefusedError(msg) from None


def _some(numbers: set[int]) -> str:
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered[:3])) + (", …" if len(ordered) > 3 else "")
