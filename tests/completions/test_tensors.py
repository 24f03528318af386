"""The bounded reader of zstd frames: good frames of every kind, and memory that stays small."""

import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from app.completions.problems import RefusedError
from app.completions.tensors import decompress_exactly
from tests.corpus.cases import make_frame


@pytest.mark.parametrize("level", [-5, 1, 3, 19, 22])
@pytest.mark.parametrize("size", [1, 32, 300, 70_000, 8 * 1024**2])
def test_frames_of_every_level_and_size_are_read(level: int, size: int) -> None:
    raw = bytes(range(256)) * (size // 256) + bytes(size % 256)
    frame = zstandard.ZstdCompressor(level=level, write_checksum=level > 2).compress(raw)
    assert decompress_exactly(frame, size) == raw


@pytest.mark.parametrize("frame", ["bomb", "bomb_unsized", "size:1099511627776", "window:31"])
def test_a_lying_frame_costs_no_memory(frame: str) -> None:
    data = make_frame(bytes(32), frame)
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError):
            decompress_exactly(data, 32)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@given(st.binary(max_size=200), st.integers(0, 300))
def test_no_bytes_make_it_fail_otherwise_than_by_refusing(data: bytes, size: int) -> None:
    for frame in (data, b"\x28\xb5\x2f\xfd" + data):
        try:
            assert len(decompress_exactly(frame, size)) == size
        except RefusedError:
            continue


@given(st.integers(0, 59), st.integers(0, 7))
def test_a_flipped_bit_gives_the_same_size_or_a_refusal(place: int, bit: int) -> None:
    raw = bytes(range(60)) * 2
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(raw))
    frame[place] ^= 1 << bit
    try:
        assert decompress_exactly(bytes(frame), len(raw)) == raw
    except RefusedError:
        return
