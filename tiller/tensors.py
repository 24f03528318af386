"""Tensors on the wire: base64 of one zstd frame, with dtype and shape beside it.

bfloat16 travels as int16 bit patterns. pyarrow brings the zstd codec, so no other library is
needed on any Python version. Decoding spends no more memory than its caller allows.
"""

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

DIMENSIONS_MAX: Final = 3  # layers, positions, hidden
BYTES_MAX: Final = 1024**3  # what decode takes unless told otherwise, as wide as on the wire
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# What dtype and original_dtype say together, and the bytes of a number.
_WIRE: Final = {("float32", "torch.float32"): 4, ("int16", "torch.bfloat16"): 2}
_SIZED: Final = {0: 0, 1: 2, 2: 4, 3: 8}  # bytes of a frame's stated size, by its flag


def encode(
    rows: npt.ArrayLike, *, dtype: Literal["float32", "bfloat16"] = "float32"
) -> dict[str, Any]:
    """Encode an array for `activations` of a Steering vector or a stored vector.

    `rows`, an array, a tensor of torch or a list of either, is [layers, hidden] or [layers,
    positions, hidden] ([hidden] for a stored vector). bfloat16 takes half the bytes and rounds to
    the nearest, ties to even. Raises ValueError for another shape, for no numbers, and for one
    that is not finite in `dtype`.
    """
    if dtype not in ("float32", "bfloat16"):
        msg = f"dtype must be 'float32' or 'bfloat16', not {dtype!r}."
        raise ValueError(msg)
    rows = _on_the_cpu(rows)
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(rows, dtype="<f4")
    # ascontiguousarray makes a list of a single number.
    if not 1 <= np.ndim(rows) <= DIMENSIONS_MAX or not array.size:
        msg = (
            f"The array has the shape {list(np.shape(rows))}; it must be [layers, hidden] or "
            "[layers, positions, hidden], all at least 1. For one vector send [vector]."
        )
        raise ValueError(msg)
    narrow = array if dtype == "float32" else _to_bfloat16(array)
    wide = array if dtype == "float32" else _from_bfloat16(narrow)
    if not np.isfinite(wide).all():
        place = [int(index) for index in np.argwhere(~np.isfinite(wide))[0]]
        msg = f"The number at {place} is not finite as {dtype}."
        raise ValueError(msg)
    packed = pa.compress(narrow.tobytes(), codec="zstd", asbytes=True)
    return {
        "data": base64.b64encode(packed).decode(),
        "dtype": narrow.dtype.name,
        "original_dtype": f"torch.{dtype}",
        "shape": list(array.shape),
        "compression": "zstd",
    }


def decode(tensor: Mapping[str, Any], *, bytes_max: int = BYTES_MAX) -> npt.NDArray[np.float32]:
    """Decode a tensor of an answer into float32; bfloat16 widens exactly.

    Raises ValueError when it is not what it says, or has more than `bytes_max` bytes on the wire
    once decompressed; both are found before memory is spent.
    """
    kind = (tensor.get("dtype"), tensor.get("original_dtype"))
    if kind not in _WIRE:
        msg = (
            f"The tensor has dtype {kind[0]!r} and original_dtype {kind[1]!r}; known are float32 "
            "with torch.float32, and int16 with torch.bfloat16."
        )
        raise ValueError(msg)
    if tensor.get("compression") != "zstd":
        msg = f"The tensor has compression {tensor.get('compression')!r}; known is 'zstd'."
        raise ValueError(msg)
    shape = tensor.get("shape")
    if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
        msg = f"The tensor has the shape {shape!r}; it must be a list of whole numbers from 0."
        raise ValueError(msg)
    size = math.prod(shape) * _WIRE[kind]
    if size > bytes_max:
        msg = f"The tensor has {size} bytes; at most {bytes_max} are taken. Raise bytes_max."
        raise ValueError(msg)
    raw = _decompress(_packed(tensor.get("data")), size)
    if kind[0] == "int16":
        return _from_bfloat16(np.frombuffer(raw, dtype="<i2").reshape(shape))
    return np.frombuffer(raw, dtype="<f4").astype(np.float32).reshape(shape)


def _on_the_cpu(rows: Any, depth: int = DIMENSIONS_MAX) -> Any:
    """Give tensors of torch as float32 that numpy can read: it has no bfloat16, and no GPU.

    Raises ValueError for lists that are nested deeper than `depth`.
    """
    if hasattr(rows, "detach"):
        return rows.detach().float().cpu()
    if not isinstance(rows, list | tuple):
        return rows
    if depth == 0:
        msg = (
            f"The array has more than {DIMENSIONS_MAX} dimensions; it must be [layers, hidden] or "
            "[layers, positions, hidden]."
        )
        raise ValueError(msg)
    return [_on_the_cpu(each, depth - 1) for each in rows]


def _packed(data: object) -> bytes:
    if not isinstance(data, str):
        msg = "The tensor's data is not a string of base64."
        raise ValueError(msg)  # noqa: TRY004 (callers expect ValueError for every bad tensor)
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:
        msg = f"The tensor's data is not base64: {error}."
        raise ValueError(msg) from error


def _decompress(frame: bytes, size: int) -> bytes:
    """Decompress a frame that says itself that it has `size` bytes."""
    stated = _stated_size(frame)
    if stated != size:
        says = "does not state its size" if stated is None else f"has {stated} bytes"
        msg = f"The tensor's frame {says}, but its shape and dtype need {size}."
        raise ValueError(msg)
    try:
        raw: bytes = pa.decompress(frame, decompressed_size=size, codec="zstd", asbytes=True)
    except (OSError, pa.ArrowException) as error:
        msg = f"The tensor's frame is damaged: {error}"
        raise ValueError(msg) from error
    return raw


def _stated_size(frame: bytes) -> int | None:
    """Read the size from a frame's header (RFC 8878, 3.1.1.1). Raises ValueError without one."""
    if not frame.startswith(_ZSTD_MAGIC) or len(frame) < 6:
        msg = "The tensor's data is not a zstd frame."
        raise ValueError(msg)
    descriptor = frame[4]
    has_window = not descriptor & 0b10_0000
    flag, dictionary = descriptor >> 6, descriptor & 0b11
    width = _SIZED[flag] if flag or has_window else 1
    start = 5 + has_window + (0, 1, 2, 4)[dictionary]
    if not width or len(frame) < start + width:
        return None
    stated = int.from_bytes(frame[start : start + width], "little")
    return stated + 256 if width == 2 else stated


def _to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Round to the nearest bfloat16, ties to even; what is not finite stays so."""
    bits = array.view(np.uint32)
    # In 64 bits nothing wraps around; NaN could round to a number, so it is written as infinity.
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isfinite(array), rounded, 0x7F80)
    return rounded.astype("<u2").view("<i2")


def _from_bfloat16(bits: npt.NDArray[np.int16]) -> npt.NDArray[np.float32]:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
