"""encode and decode: the same bits as the service reads and writes, whatever a frame claims."""

import base64
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from app.completions.sent_vectors import VectorReader
from tests.corpus.cases import encoded, make_frame
from tiller import decode, encode

NUMBERS = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=1, max_dims=3, max_side=5),
    elements=st.floats(-(2.0**126), 2.0**126, width=32),
)


def bits(array: Any) -> list[int]:
    return np.ascontiguousarray(array, dtype=np.float32).view(np.uint32).ravel().tolist()


@given(array=NUMBERS)
def test_float32_comes_back_bit_for_bit(array: Any) -> None:
    found = decode(encode(array))
    assert found.shape == array.shape
    assert bits(found) == bits(array)


@given(array=NUMBERS)
def test_bfloat16_rounds_as_torch_does(array: Any) -> None:
    sent = encode(array, dtype="bfloat16")
    assert (sent["dtype"], sent["original_dtype"]) == ("int16", "torch.bfloat16")
    assert bits(decode(sent)) == bits(torch.from_numpy(array).bfloat16().float().numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 4, 3)])
def test_the_service_reads_what_encode_writes(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape) / 7
    sent = encode(array, dtype=dtype)
    reader = VectorReader({})
    vector = reader.read(reader.measure(sent))
    assert (vector.dtype, vector.shape) == (dtype, shape)
    assert bits(vector.to_float32()) == bits(decode(sent))


def test_lists_of_rows_and_other_number_types_are_encoded_as_float32() -> None:
    rows = [[1, 2.5], np.array([3.0, 4.0], dtype=np.float16)]
    assert decode(encode(rows)).tolist() == [[1.0, 2.5], [3.0, 4.0]]
    assert decode(encode(np.arange(4).reshape(2, 2).T)).tolist() == [[0.0, 2.0], [1.0, 3.0]]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_lists_of_tensors_are_encoded_as_the_tensor_of_them_is(kind: torch.dtype) -> None:
    wide = (torch.arange(24).reshape(2, 3, 4) * 7 - 80).to(kind)
    if kind.is_floating_point:
        wide.requires_grad_()
    lists: list[Any] = [
        list(wide),
        tuple(wide),
        [list(rows) for rows in wide],
        [[list(row) for row in rows] for rows in wide],
        [wide[0], wide[1].tolist()],
        [list(wide[0]), wide[1].detach().float().numpy()],
    ]
    for rows in lists:
        assert encode(rows) == encode(wide)
        assert encode(rows, dtype="bfloat16") == encode(wide, dtype="bfloat16")


@pytest.mark.parametrize(
    "rows",
    [
        [torch.ones(2, 2, 2, dtype=torch.bfloat16)] * 2,
        [[[[torch.ones(1, requires_grad=True)]]]],
        [torch.ones(2), torch.ones(3)],
        [torch.tensor([float("nan")])],
        [torch.tensor([1e300], dtype=torch.float64)],
    ],
)
def test_a_list_of_tensors_that_no_vector_can_be_is_not_encoded(rows: Any) -> None:
    with pytest.raises(ValueError):
        encode(rows)


def test_a_list_that_contains_itself_is_not_encoded() -> None:
    rows: list[Any] = []
    rows.append(rows)
    with pytest.raises(ValueError, match="more than 3 dimensions"):
        encode(rows)


@pytest.mark.parametrize(
    "rows", [1.0, [], [[]], [[[[1.0]]]], [[1.0, 2.0], [3.0]], [[float("nan")]], [[1e39]], [["a"]]]
)
def test_what_no_vector_can_be_is_not_encoded(rows: Any) -> None:
    with pytest.raises(ValueError):
        encode(rows)


def test_a_number_that_only_float32_holds_is_named_by_its_place() -> None:
    largest = float(np.finfo(np.float32).max)
    assert decode(encode([[largest]])).tolist() == [[largest]]
    with pytest.raises(ValueError, match=r"\[0, 1\] is not finite as bfloat16"):
        encode([[1.0, largest]], dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype must be"):
        encode([[1.0]], dtype="float16")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_named_capture_decodes_whatever_stands_beside_its_numbers(dtype: Any) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    capture = {**encode(array, dtype=dtype), "layers": [0, 2], "positions": [3, 4, 5]}
    assert bits(decode(capture)) == bits(array)
    assert decode(capture).dtype == np.float32


def test_tensors_of_no_rows_decode() -> None:
    sent = {**encode([[1.0]]), "shape": [0, 3], "data": packed(b"")}
    assert decode(sent).shape == (0, 3)


@pytest.mark.parametrize(
    "frame",
    ["raw", "gzip", "lz4", "two", "trailing", "skippable", "skippable_before",
     "flipped", "unsized", "short_content", "long_content", "empty_content", "bomb",
     "bomb_unsized", "bad_checksum", "cut:0", "cut:4", "cut:6", "cut:12", "size:0", "size:31",
     "size:1000000000000", "dictionary"],
)  # fmt: skip
def test_a_frame_that_is_not_what_the_shape_says_is_refused_without_memory(frame: str) -> None:
    sent = encoded(shape=[1, 8], frame=frame)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            decode(sent)
        assert tracemalloc.get_traced_memory()[1] < 1024**2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "float64"},
        {"dtype": "O"},
        {"original_dtype": "torch.bfloat16"},
        {"original_dtype": None},
        {"compression": "gzip"},
        {"compression": None},
        {"shape": [8]},
        {"shape": [-1, -8]},
        {"shape": [1.0, 8]},
        {"shape": "8"},
        {"shape": [2**40, 2**40]},
        {"data": None},
        {"data": "no base64"},
        {"data": ""},
    ],
)
def test_a_tensor_that_says_something_else_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        decode({**encode([[1.0] * 4]), **wrong})


def test_more_bytes_than_allowed_are_refused_before_they_are_decompressed() -> None:
    sent = {**encode([[1.0]]), "shape": [2**28, 2], "data": packed(bytes(2**20))}
    with pytest.raises(ValueError, match="Raise bytes_max"):
        decode(sent)
    small = encode([[1.0, 2.0]])
    assert decode(small, bytes_max=8).tolist() == [[1.0, 2.0]]
    with pytest.raises(ValueError, match="has 8 bytes; at most 7"):
        decode(small, bytes_max=7)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 255, 256, 257, 65_791, 65_792, 300_000])
def test_sizes_are_read_from_headers_of_every_width(size: int) -> None:
    data = np.zeros(size, dtype=np.float32)
    for level in (1, 19):
        frame = zstandard.ZstdCompressor(level=level).compress(data.tobytes())
        sent = {**encode([[1.0]]), "shape": [size], "data": base64.b64encode(frame).decode()}
        assert bits(decode(sent)) == bits(data)


def test_the_frame_of_the_corpus_that_is_good_decodes() -> None:
    assert decode(encoded(shape=[1, 8], value=2)).tolist() == [[2.0] * 8]
    assert decode(encoded(shape=[2, 8], value=2, kind="bfloat16")).tolist() == [[2.0] * 8] * 2
    assert make_frame(b"", "good").startswith(b"\x28\xb5\x2f\xfd")


def test_the_client_imports_nothing_of_the_server() -> None:
    program = "import sys, tiller; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True
    )
    heavy = {"app", "worker", "torch", "vllm", "fastapi", "psycopg", "celery"}
    assert not heavy & set(found.stdout.split())


def packed(data: bytes) -> str:
    return base64.b64encode(zstandard.ZstdCompressor().compress(data)).decode()
