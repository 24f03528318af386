"""Whatever the bytes are, an upload is finite numbers of an allowed shape, or a refusal."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import InvalidRequestError
from app.settings import Limits
from app.steering.vectors import ITEM_BYTES
from app.vectors.npy import write_npy
from app.vectors.upload import read_upload
from tests.vectors.files import FORM, NPY, OCTETS, SAFETENSORS, form, npy, safetensors

LIMITS = Limits(vector_numbers=100)
ARRAY = np.arange(12, dtype="<f4").reshape(3, 4)
BITS = np.full(4, 0x3F80, "<u2").tobytes()
GOOD = (
    npy(ARRAY),
    npy(ARRAY.astype(">f8"), version=(2, 0)),
    npy(np.asfortranarray(ARRAY.astype("<f2"))),
    safetensors({"v": ("F32", [3, 4], ARRAY.tobytes()), "w": ("BF16", [4], BITS)}),
    safetensors({"v": ("F16", [2, 3], b"\0\x3c" * 6)}, __metadata__={"a": "b"}),
    form(("file", npy(ARRAY)), ("name", b"x"), ("metadata", b'{"a": "b"}')),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good file with some bytes changed, cut out, doubled or added."""
    data = bytearray(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 12)))
        data[start:end] = draw(
            st.one_of(st.binary(max_size=12), st.just(bytes(data[start:end]) * 2))
        )
    return bytes(data)


@settings(max_examples=600, deadline=None)
@given(
    body=st.one_of(damaged(), st.binary(max_size=200)),
    kind=st.sampled_from([NPY, SAFETENSORS, OCTETS, FORM, None, "application/json"]),
    tensor=st.sampled_from([None, "v", "w", "\U0001f600"]),
)
def test_any_bytes_are_numbers_or_are_refused(
    body: bytes, kind: str | None, tensor: str | None
) -> None:
    try:
        upload = read_upload(body, kind, {} if tensor is None else {"tensor": tensor}, LIMITS)
    except InvalidRequestError:
        return
    vector = upload.vector
    assert 1 <= len(vector.shape) <= 3
    assert 1 <= math.prod(vector.shape) <= LIMITS.vector_numbers
    assert len(vector.data) == math.prod(vector.shape) * ITEM_BYTES[vector.dtype]
    assert math.isfinite(vector.largest)


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 100),
    seed=st.integers(0, 2**32),
)
def test_what_is_downloaded_can_be_uploaded_again(shape: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(shape).astype("<f4")
    vector = read_upload(npy(values), NPY, {}, LIMITS).vector
    assert vector.to_float32().tobytes() == values.tobytes()
    assert read_upload(write_npy(vector), OCTETS, {}, LIMITS).vector == vector
