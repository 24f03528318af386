"""Reads the corpus: JSON files of cases, and the builders for bytes that JSON cannot hold.

A case is {"name", one of "job" | "request" | "raw" | "raw_base64" | "chunks", "headers", "method",
"path", "status", "code", "param", "says"}. "job" is a Job's body (model and one good request are
filled in), "request" a single request of one (a good prompt is filled in; `param` is then
relative to it). Expected are 400 and `invalid_request` unless the case says otherwise.

Values with one key that begins with $ are built: {"$row": n, "of": x} a row of numbers,
{"$list": [x, n]}, {"$text": [s, n]}, {"$ids": n} token ids, {"$keys": n} an object of n keys,
{"$encoded": {...}} an encoded vector, right unless told how to break it.
"""

import base64
import gzip
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

FOLDER = Path(__file__).parent
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"skip"


@dataclass(frozen=True)
class Case:
    """One bad input and the answer that it must get."""

    name: str
    data: dict[str, Any]

    @property
    def status(self) -> int:
        """The expected status."""
        return int(self.data.get("status", 400))

    @property
    def code(self) -> str:
        """The expected code of the error."""
        return str(self.data.get("code", "invalid_request"))

    @property
    def param(self) -> str | None:
        """The expected param of the error; only checked when the case names one."""
        param = self.data.get("param")
        is_inner = "request" in self.data and param != "Idempotency-Key" and param is not None
        return f"requests[0].{param}" if is_inner else param


def read_cases() -> list[Case]:
    """Read every case of every folder."""
    return [
        Case(f"{file.parent.name}/{file.stem}: {data['name']}", data)
        for file in sorted(FOLDER.rglob("*.json"))
        for data in json.loads(file.read_text(encoding="utf-8"))["cases"]
    ]


def body_of(data: dict[str, Any], names: dict[str, str]) -> bytes:
    """Build the body of a case; `names` fills in what is made at run time."""
    if "raw" in data:
        return str(data["raw"]).encode()
    if "raw_base64" in data:
        return base64.b64decode(data["raw_base64"])
    if "job" in data:
        sent = build(data["job"], names)
        empty = not data["job"]
        job = sent if empty else {"model": "tiny", "requests": [{"prompt": "hi"}], **sent}
    else:
        job = {
            "model": "tiny",
            "requests": [{"prompt": "hi", **build(data.get("request", {}), names)}],
        }
    return json.dumps(job).encode()


def build(value: Any, names: dict[str, str]) -> Any:
    """Replace {"$...": ...} by what it stands for."""
    if isinstance(value, list):
        return [build(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    name, options = next(iter(value.items()), ("", None))
    if not name.startswith("$"):
        return {key: build(item, names) for key, item in value.items()}
    builders: dict[str, Callable[[], Any]] = {
        "$row": lambda: [value.get("of", 1.0)] * options,
        "$list": lambda: [build(options[0], names)] * options[1],
        "$text": lambda: options[0] * options[1],
        "$ids": lambda: [2] * options,
        "$keys": lambda: {f"key{number}": 1 for number in range(options)},
        "$encoded": lambda: encoded(**options),
        "$foreign_vector": lambda: names["foreign_vector"],
    }
    return builders[name]()


def encoded(
    *,
    shape: list[int],
    value: float | str = 1.0,
    kind: str = "float32",
    frame: str = "good",
    base64: str = "good",
    set: dict[str, Any] | None = None,  # noqa: A002 (reads well in the JSON)
    drop: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Encode a vector of one repeated number, broken as told."""
    numbers = np.full(shape, np.pi if value == "wild" else float(value), dtype="<f4")
    raw = numbers.tobytes()
    if kind == "bfloat16":
        raw = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    fields = {
        "data": write_base64(make_frame(raw, frame), base64),
        "dtype": "float32" if kind == "float32" else "int16",
        "original_dtype": f"torch.{kind}",
        "shape": shape,
        "compression": "zstd",
    }
    return {key: item for key, item in {**fields, **(set or {})}.items() if key not in drop}


def write_base64(data: bytes, how: str) -> str:
    """Write base64 as told."""
    text = base64.b64encode(data).decode()
    if how == "urlsafe":
        assert "/" in text or "+" in text, "this content shows no difference"
        return text.replace("+", "-").replace("/", "_")
    if how == "lines":
        return text[:20] + "\n" + text[20:]
    return f"data:application/zstd;base64,{text}" if how == "data_url" else text


def make_frame(raw: bytes, how: str) -> bytes:
    """Compress bytes into a frame that is good, or broken as told ("cut:5", "size:0", ...)."""
    compress = zstandard.ZstdCompressor().compress
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(raw)
    good, size = compress(raw), len(raw)
    how, _, number = how.partition(":")
    frames: dict[str, Callable[[], bytes]] = {
        "good": lambda: good,
        "raw": lambda: raw,
        "gzip": lambda: gzip.compress(raw),
        "lz4": lambda: b"\x04\x22\x4d\x18" + raw,
        "two": lambda: good + good,
        "trailing": lambda: good + b"x",
        "skippable": lambda: SKIPPABLE,
        "skippable_before": lambda: SKIPPABLE + good,
        "skippable_after": lambda: good + SKIPPABLE,
        "flipped": lambda: b"\x29" + good[1:],
        "unsized": lambda: unsized(raw),
        "short_content": lambda: compress(raw[:-1]),
        "long_content": lambda: compress(raw + b"\0"),
        "empty_content": lambda: compress(b""),
        "bomb": lambda: compress(bytes(256 * 1024**2)),
        "bomb_unsized": lambda: unsized(bytes(256 * 1024**2)),
        "bad_checksum": lambda: checked[:-1] + bytes([checked[-1] ^ 1]),
        "cut": lambda: good[: int(number)],
        "size": lambda: raw_frame(raw, content_size=int(number)),
        "window": lambda: raw_frame(raw, content_size=size, window_log=int(number)),
        "dictionary": lambda: raw_frame(raw, content_size=size, dictionary=7),
    }
    return frames[how]()


def raw_frame(
    raw: bytes, *, content_size: int, window_log: int | None = None, dictionary: int = 0
) -> bytes:
    """Write a frame with one uncompressed block by hand, with the header that is asked for."""
    single = window_log is None
    descriptor = 0b1100_0000 | (0b10_0000 if single else 0) | (1 if dictionary else 0)
    header = b"\x28\xb5\x2f\xfd" + bytes([descriptor])
    if window_log is not None:
        header += bytes([(window_log - 10) << 3])
    if dictionary:
        header += bytes([dictionary])
    header += struct.pack("<Q", content_size)
    block = struct.pack("<I", (len(raw) << 3) | 1)[:3]
    return header + block + raw
