r"""Reads and writes .npy files: one array, a header of text, then its bytes.

    \x93NUMPY, version, length of the header, {'descr': '<f4', 'fortran_order': ..., 'shape': ...}

The header is Python source by its definition; here it is matched, never evaluated, and an array
of objects (which is a pickle) is refused by its descr. The bytes must be exactly those that shape
and descr need.
"""

import math
import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from app.completions.problems import RefusedError, shown
from app.steering.vectors import Vector
from app.vectors.numbers import check_shape, vector_of_floats

MAGIC: Final = b"\x93NUMPY"
HEADER_BYTES_MAX: Final = 10_000  # what numpy itself reads without being told to trust the file
_VERSIONS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # bytes of the header's length
_DESCR = re.compile(r"[<>=]f(2|4|8)")
_ITEM = re.compile(
    r"""\s*(?:'(?P<key>descr|fortran_order|shape)'|"(?P<key2>descr|fortran_order|shape)")\s*:\s*
    (?P<value>'[^'\\]{0,40}' | "[^"\\]{0,40}" | True | False | \([0-9L,\ ]{0,200}\))
    \s*(?:,|(?=\s*\}))""",
    re.VERBOSE,
)
_SHAPE = re.compile(r"\(\s*(?:[0-9]{1,18}L?\s*,\s*)*(?:[0-9]{1,18}L?)?\s*\)")
_KEYS = {"descr", "fortran_order", "shape"}


def read_npy(data: bytes, numbers_max: int) -> Vector:
    """Read a whole .npy file. Raises RefusedError."""
    header, start = _header(data)
    descr, fortran_order, shape = _facts(header)
    check_shape(shape, numbers_max)
    dtype: np.dtype[Any] = np.dtype(descr)
    needed, there = math.prod(shape) * dtype.itemsize, len(data) - start
    if needed != there:
        msg = (
            f"has {there} bytes of numbers, but its shape {shown(list(shape))} of {descr} needs "
            f"{needed}; the file is cut or damaged"
        )
        raise RefusedError(msg)
    values: npt.NDArray[Any] = np.frombuffer(data, dtype, offset=start)
    values = values.reshape(shape[::-1]).T if fortran_order else values.reshape(shape)
    return vector_of_floats(values)


def write_npy(vector: Vector) -> bytes:
    """Write a vector as a .npy file of float32."""
    shape = repr(tuple(vector.shape))
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    room = -(len(MAGIC) + 4 + len(text) + 1) % 64  # numbers begin at a multiple of 64
    header = text.encode() + b" " * room + b"\n"
    start = MAGIC + b"\x01\x00" + len(header).to_bytes(2, "little") + header
    return start + vector.to_float32().tobytes()


def _header(data: bytes) -> tuple[str, int]:
    """Give the header's text and where the numbers begin."""
    at = len(MAGIC) + 2
    size_bytes = _VERSIONS.get(tuple(data[len(MAGIC) : at])) if len(data) >= at else None  # type: ignore[arg-type]
    if size_bytes is None:
        msg = "is a .npy file of an unknown version, or cut within its first bytes"
        raise RefusedError(msg)
    size = int.from_bytes(data[at : at + size_bytes], "little")
    start = at + size_bytes + size
    if size > HEADER_BYTES_MAX:
        msg = f"has a .npy header of {size} bytes; at most {HEADER_BYTES_MAX} are allowed"
        raise RefusedError(msg)
    if len(data) < start:
        msg = "is cut within its .npy header"
        raise RefusedError(msg)
    return data[at + size_bytes : start].decode("latin-1"), start


def _facts(header: str) -> tuple[str, bool, tuple[int, ...]]:
    """Read descr, fortran_order and shape, each exactly once and nothing else."""
    text = header.strip()
    found: dict[str, str] = {}
    at = 1
    while match := _ITEM.match(text, at):
        key = match["key"] or match["key2"]
        if key in found:
            break
        found[key] = match["value"]
        at = match.end()
    if not text.startswith("{") or text[at:].strip() != "}" or set(found) != _KEYS:
        msg = f"has a .npy header that is not that of an array of numbers: {shown(text)}"
        raise RefusedError(msg)
    descr = found["descr"].strip("'\"")
    if not _DESCR.fullmatch(descr):
        pickled = " (an array of objects is a pickle, which is never read)" if "O" in descr else ""
        msg = (
            f"holds numbers of the kind {shown(descr)}{pickled}; convert them with "
            '.astype("float32")'
        )
        raise RefusedError(msg)
    if found["fortran_order"] not in ("True", "False") or not _SHAPE.fullmatch(found["shape"]):
        msg = f"has a .npy header that is not that of an array of numbers: {shown(text)}"
        raise RefusedError(msg)
    shape = tuple(int(size) for size in re.findall("[0-9]+", found["shape"]))
    return descr, found["fortran_order"] == "True", shape
