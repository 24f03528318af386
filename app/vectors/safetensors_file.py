"""Reads .safetensors files: a length, a JSON header of names, then the tensors' bytes.

    8 bytes length N | N bytes {"name": {"dtype", "shape", "data_offsets": [start, end]}} | bytes

Strict, because a file that two readers understand differently is an attack: names come once, the
tensors lie one behind the other without gaps, and together they are all of the bytes.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson

from app.completions.problems import RefusedError, is_int, shown
from app.steering.vectors import Vector
from app.vectors.numbers import check_shape, vector_of_bfloat16, vector_of_floats

HEADER_BYTES_MAX: Final = 1024**2
NAMES_SHOWN: Final = 20
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def is_safetensors(data: bytes) -> bool:
    """Tell whether bytes begin as such a file does: a length, and the brace of its header."""
    return data[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def read_safetensors(data: bytes, name: str | None, numbers_max: int) -> Vector:
    """Read the tensor `name`, or the only one, of a whole file. Raises RefusedError."""
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + size
    if size > HEADER_BYTES_MAX:
        msg = f"has a safetensors header of {size} bytes; at most {HEADER_BYTES_MAX} are allowed"
        raise RefusedError(msg)
    if len(data) < start:
        msg = "is cut within its safetensors header"
        raise RefusedError(msg)
    tensors = _tensors(_header(data[_LENGTH_BYTES:start]), len(data) - start)
    tensor = _choose(tensors, name)
    check_shape(tensor.shape, numbers_max)
    item = _ITEM_BYTES.get(tensor.dtype)
    if item is None:
        msg = (
            f"has the tensor {shown(tensor.name)} of dtype {shown(tensor.dtype)}; allowed are "
            f"{', '.join(_ITEM_BYTES)}"
        )
        raise RefusedError(msg)
    needed = item * math.prod(tensor.shape)
    if needed != tensor.end - tensor.start:
        msg = (
            f"has {tensor.end - tensor.start} bytes for the tensor {shown(tensor.name)}, but its "
            f"shape {shown(list(tensor.shape))} of {tensor.dtype} needs {needed}"
        )
        raise RefusedError(msg)
    content = data[start + tensor.start : start + tensor.end]
    if tensor.dtype == "BF16":
        return vector_of_bfloat16(content, tensor.shape)
    return vector_of_floats(np.frombuffer(content, _FLOATS[tensor.dtype]).reshape(tensor.shape))


def _header(raw: bytes) -> dict[str, Any]:
    try:
        orjson.loads(raw)  # refuses lone surrogates, which no answer can repeat; json takes them
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        msg = "has a safetensors header that is not a JSON object, or in which a name comes twice"
        raise RefusedError(msg)
    return header


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        msg = "a name comes twice"
        raise ValueError(msg)
    return dict(pairs)


def _tensors(header: dict[str, Any], there: int) -> list[_Tensor]:
    tensors = [_tensor(name, facts) for name, facts in header.items() if name != _METADATA]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    end = 0
    for tensor in tensors:
        if tensor.start != end or tensor.end < tensor.start:
            msg = (
                f"has the tensor {shown(tensor.name)} at bytes {tensor.start} to {tensor.end}; "
                f"tensors must follow each other, so this one must begin at {end}"
            )
            raise RefusedError(msg)
        end = tensor.end
    if end != there:
        msg = f"has {there} bytes of tensors, but its header names {end}; it is cut or damaged"
        raise RefusedError(msg)
    return tensors


def _tensor(name: str, facts: Any) -> _Tensor:
    fields: dict[str, Any] = facts if isinstance(facts, dict) else {}
    dtype, shape = fields.get("dtype"), _sizes(fields.get("shape"))
    offsets = _sizes(fields.get("data_offsets"))
    if (
        not isinstance(dtype, str)
        or shape is None
        or offsets is None
        or len(offsets) != 2
        or len(fields) != 3
    ):
        msg = f"has a safetensors header that describes the tensor {shown(name)} wrongly"
        raise RefusedError(msg)
    return _Tensor(name, dtype, shape, *offsets)


def _sizes(value: Any) -> tuple[int, ...] | None:
    is_good = isinstance(value, list) and all(is_int(item) and 0 <= item < 2**63 for item in value)
    return tuple(value) if is_good else None


def _choose(tensors: list[_Tensor], name: str | None) -> _Tensor:
    chosen = [tensor for tensor in tensors if name in (None, tensor.name)]
    if len(chosen) == 1:
        return chosen[0]
    if not tensors:
        msg = "holds no tensor"
        raise RefusedError(msg)
    names = ", ".join(shown(tensor.name) for tensor in tensors[:NAMES_SHOWN])
    if len(tensors) > NAMES_SHOWN:
        names += f" and {len(tensors) - NAMES_SHOWN} more"
    if name is not None:
        msg = f"has no tensor {shown(name)}; it has {names}"
        raise RefusedError(msg)
    msg = f"holds {len(tensors)} tensors; choose one with ?tensor=NAME: {names}"
    raise RefusedError(msg)
