"""From numbers that a file or a body holds to a Vector: shape, dtype and range are checked here.

A shape is judged before a number is looked at, so that memory never follows what a header
claims. Floating point numbers become float32; bfloat16 stays as it is, bit for bit.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from app.completions.problems import RefusedError, shown
from app.completions.sent_vectors import VectorReader
from app.steering.vectors import Vector

SHAPES = "[width], [rows, width] or [layers, positions, width]"


def check_shape(shape: Sequence[int], numbers_max: int) -> None:
    """Raise RefusedError unless a vector may have this shape."""
    text = shown(list(shape))
    if not 1 <= len(shape) <= 3:
        msg = f"has {len(shape)} dimensions; a vector is {SHAPES}"
        raise RefusedError(msg)
    if not all(shape):
        msg = f"has the shape {text} and so no numbers; every dimension must be at least 1"
        raise RefusedError(msg)
    if max(shape) > numbers_max or math.prod(shape) > numbers_max:
        msg = f"has the shape {text}; at most {numbers_max} numbers are allowed"
        raise RefusedError(msg)


def vector_of_floats(values: npt.NDArray[np.floating[Any]]) -> Vector:
    """Convert floating point numbers of any width to float32. Raises RefusedError."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = np.ascontiguousarray(values, dtype="<f4")
    if not np.isfinite(narrow).all():
        first = np.unravel_index(int(np.argmin(np.isfinite(narrow))), narrow.shape)
        place = ", ".join(map(str, map(int, first)))
        msg = (
            f"holds {float(values[first])!r} at [{place}]; every number must be finite as float32 "
            "(-3.4028235e+38 to 3.4028235e+38)"
        )
        raise RefusedError(msg)
    return Vector("float32", narrow.shape, narrow.tobytes())


def vector_of_bfloat16(data: bytes, shape: tuple[int, ...]) -> Vector:
    """Take bfloat16 bit patterns (little-endian) as they are. Raises RefusedError."""
    vector = Vector("bfloat16", shape, data)
    if not math.isfinite(vector.largest):
        msg = "holds a number that is not finite (NaN or Infinity)"
        raise RefusedError(msg)
    return vector


def vector_of_json(sent: Any, numbers_max: int) -> Vector:
    """Read nested lists of numbers, or an encoded object. Raises RefusedError."""
    if not isinstance(sent, list | dict):
        msg = f"must be numbers in lists ({SHAPES}) or an encoded object, not {shown(sent)}"
        raise RefusedError(msg)
    reader = VectorReader({})
    found = reader.measure(sent)
    check_shape(found.shape, numbers_max)
    return reader.read(found)
