"""Tensors on the wire: base64 of one zstd frame, with dtype and shape beside it.

bfloat16 travels as int16 bit patterns. pyarrow brings the zstd codec, so no other library is
needed on any Python version.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def encode(rows: npt.ArrayLike) -> dict[str, Any]:
    """Encode an array as float32 for `activations` of a Steering vector.

    `rows` is [layers, hidden] or [layers, positions, hidden].
    """
    array = np.ascontiguousarray(rows, dtype=np.float32)
    packed = pa.compress(array.tobytes(), codec="zstd", asbytes=True)
    return {
        "data": base64.b64encode(packed).decode(),
        "dtype": "float32",
        "original_dtype": "torch.float32",
        "shape": list(array.shape),
        "compression": "zstd",
    }


def decode(tensor: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """Decode a tensor of an answer into float32; bfloat16 widens exactly."""
    packed = base64.b64decode(tensor["data"], validate=True)
    dtype = np.dtype(tensor["dtype"])
    shape = tuple(tensor["shape"])
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not packed.startswith(_ZSTD_MAGIC):
        msg = "The tensor's data is not a zstd frame."
        raise ValueError(msg)
    raw = pa.decompress(packed, decompressed_size=size, codec="zstd", asbytes=True)
    array = np.frombuffer(raw, dtype=dtype).reshape(shape)
    if tensor["original_dtype"] == "torch.bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)
