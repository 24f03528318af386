"""Frames that lie: each is refused at once, and the memory of a process stays where it was.

A process of its own reads them, because the memory of zstd itself is not Python's: what it needs
at most is the high-water mark that the kernel keeps.
"""

import base64
import json
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import zstandard

from tests.corpus.cases import SKIPPABLE, make_frame, raw_frame
from tests.rules.source_tree import ROOT

SIZE = 32  # bytes of the eight numbers that every frame should hold
RAW = np.arange(1, 9, dtype="<f4").tobytes()
MAGIC = b"\x28\xb5\x2f\xfd"
BOMB_BYTES = 1024**3
GROWTH_MAX = 2 * 1024**2
SECONDS_MAX = 3.0  # milliseconds are usual; a machine under load gets more

READER = """
import json, sys, time, base64, pathlib
from app.completions.problems import RefusedError
from app.completions.tensors import decompress_exactly

def memory(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024

def read(frame, size):
    try:
        decompress_exactly(frame, size)
    except RefusedError as refusal:
        return str(refusal)
    return None

cases = {name: base64.b64decode(data) for name, data in json.load(sys.stdin).items()}
read(b"", 32)
found = {}
for name, frame in cases.items():
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, began = memory("VmRSS"), time.perf_counter()
    refusal = read(frame, 32)
    found[name] = [refusal, time.perf_counter() - began, memory("VmHWM") - before]
json.dump(found, sys.stdout)
"""


def blocks(*blocks: tuple[int, int, bytes], content_size: int = SIZE) -> bytes:
    """Write a frame of blocks by hand: (type, stated size, bytes); the last one is the last.

    Types: 0 raw, 1 a byte that repeats, 2 compressed, 3 reserved.
    """
    frame = MAGIC + bytes([0b1110_0000]) + struct.pack("<Q", content_size)
    for place, (kind, size, data) in enumerate(blocks):
        is_last = place == len(blocks) - 1
        frame += struct.pack("<I", (size << 3) | (kind << 1) | is_last)[:3] + data
    return frame


def repeated(total: int) -> bytes:
    """Write a frame of `total` zeros in blocks of 128 KiB that take four bytes each."""
    count = total // (128 * 1024)
    return blocks(*[(1, 128 * 1024, b"\0")] * count, content_size=total)


def with_dictionary() -> bytes:
    """Compress with a dictionary that the reader does not have, and without saying so."""
    dictionary = zstandard.ZstdCompressionDict(RAW * 8, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return zstandard.ZstdCompressor(dict_data=dictionary, write_dict_id=False).compress(RAW)


FRAMES: dict[str, bytes] = {
    "a bomb that states its size": repeated(BOMB_BYTES),
    "a bomb that states 32 bytes": blocks(*[(1, 128 * 1024, b"\0")] * 8192),
    "a bomb without a size": zstandard.ZstdCompressor(write_content_size=False).compress(
        bytes(64 * 1024**2)
    ),
    "a bomb behind a good frame": make_frame(RAW, "good") + repeated(BOMB_BYTES),
    "a bomb behind skippable frames": SKIPPABLE * 1000 + repeated(BOMB_BYTES),
    "a size of 2**63": raw_frame(RAW, content_size=2**63),
    "a size of 2**64 - 1": raw_frame(RAW, content_size=2**64 - 1),
    "a size one less": raw_frame(RAW, content_size=31),
    "a size one more": raw_frame(RAW, content_size=33),
    "a size of nothing": raw_frame(b"", content_size=0),
    "the right size, too few bytes": raw_frame(RAW[:-1], content_size=SIZE),
    "the right size, too many bytes": raw_frame(RAW + b"\0", content_size=SIZE),
    "the right size, no bytes": raw_frame(b"", content_size=SIZE),
    "no size": make_frame(RAW, "unsized"),
    "a window of 128 MiB": raw_frame(RAW, content_size=SIZE, window_log=27),
    "a window of 2 GiB": raw_frame(RAW, content_size=SIZE, window_log=31),
    "the widest window there is": raw_frame(RAW, content_size=SIZE, window_log=41),
    "a dictionary by its number": make_frame(RAW, "dictionary"),
    "a dictionary that is not named": with_dictionary(),
    "two frames": make_frame(RAW, "two"),
    "two halves": make_frame(RAW[:16], "good") + make_frame(RAW[16:], "good"),
    "trailing bytes": make_frame(RAW, "good") + b"\0",
    "64 KiB of trailing bytes": make_frame(RAW, "good") + bytes(65_536),
    "a skippable frame alone": SKIPPABLE,
    "a skippable frame before": SKIPPABLE + make_frame(RAW, "good"),
    "a skippable frame behind": make_frame(RAW, "good") + SKIPPABLE,
    "a skippable frame of 4 GiB": struct.pack("<II", 0x184D2A5F, 2**32 - 1),
    "a reserved block": blocks((3, SIZE, RAW)),
    "a reserved bit": MAGIC + bytes([0b1110_1000]) + make_frame(RAW, "size:32")[5:],
    "a block of two megabytes": blocks((1, 2**21 - 1, b"\0")),
    "100,000 empty blocks": blocks(*[(0, 0, b"")] * 100_000),
    "a compressed block of nonsense": blocks((2, 20, b"\xff" * 20)),
    "a wrong checksum": make_frame(RAW, "bad_checksum"),
    "an older format": b"\x27\xb5\x2f\xfd" + make_frame(RAW, "good")[4:],
    "no bytes": b"",
    "the magic alone": MAGIC,
    **{
        f"cut to {size} bytes": make_frame(RAW, "good")[:size]
        for size in range(1, len(make_frame(RAW, "good")))
    },
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Read every frame in one process: what was told, seconds, growth of memory in bytes."""
    sent = {name: base64.b64encode(frame).decode() for name, frame in FRAMES.items()}
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input=json.dumps(sent),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_lies_is_refused_at_once_with_flat_memory(
    found: dict[str, Any], name: str
) -> None:
    refusal, seconds, growth = found[name]
    assert refusal is not None, "it was taken"
    assert "data" in refusal or "zstd" in refusal
    assert seconds < SECONDS_MAX
    assert growth < GROWTH_MAX, f"{growth} bytes"


def test_the_reader_of_this_test_sees_memory_that_is_spent() -> None:
    program = READER.replace("decompress_exactly(frame, size)", "bytes(bytearray(64 * 1024**2))")
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps({"any": ""}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    refusal, _, growth = json.loads(done.stdout)["any"]
    assert refusal is None
    assert growth > 64 * 1024**2
