"""The rules of a download, without HTTP objects: which bytes, under which headers (RFC 9110).

A file's ETag is its sha256, so a cached or half-loaded copy is known to be the same bytes
wherever they came from. Only single ranges are served; several at once get the whole file, as
the RFC allows.
"""

import base64
import re
from dataclasses import dataclass
from typing import Final

from app.jobs.records import PublishedFile

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})\Z")
_MEDIA_TYPES: Final = {
    ".parquet": "application/vnd.apache.parquet",
    ".json": "application/json",
}


class UnsatisfiableRangeError(Exception):
    """The range lies outside the file: 416."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes [start, end) of a file; `partial` when they were asked for by a Range header."""

    start: int
    end: int
    partial: bool

    @property
    def size(self) -> int:
        """How many bytes these are."""
        return self.end - self.start


def etag_of(sha256: str) -> str:
    """Write the strong ETag of a file."""
    return f'"{sha256}"'


def is_unchanged(if_none_match: str | None, etag: str) -> bool:
    """Tell whether the client has these bytes already (the answer is 304)."""
    if if_none_match is None:
        return False
    known = [item.strip().removeprefix("W/") for item in if_none_match.split(",")]
    return etag in known or "*" in known


def chosen_range(
    range_header: str | None, if_range: str | None, *, etag: str, size: int
) -> ByteRange:
    """Choose the bytes to send. Raises UnsatisfiableRangeError.

    A Range header that is malformed, or whose If-Range names other bytes, is ignored.
    """
    whole = ByteRange(0, size, partial=False)
    if range_header is None or (if_range is not None and if_range.strip() != etag):
        return whole
    match = _RANGE.match(range_header.strip().replace(" ", ""))
    if match is None or match.groups() == ("", ""):
        return whole
    first, last = match.groups()
    if first == "":
        start, end = max(0, size - int(last)), size
    else:
        start = int(first)
        end = min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return whole
    if start >= size or start >= end:
        raise UnsatisfiableRangeError
    return ByteRange(start, end, partial=True)


def file_headers(file: PublishedFile, part: ByteRange) -> dict[str, str]:
    """Give the headers of an answer that carries `part` of a file (or of a HEAD on it)."""
    digest = base64.b64encode(bytes.fromhex(file.sha256)).decode()
    headers = {
        "accept-ranges": "bytes",
        "cache-control": "private, no-cache",
        "content-disposition": f'attachment; filename="{file.path.replace("/", "-")}"',
        "content-length": str(part.size),
        "content-type": media_type(file.path),
        "etag": etag_of(file.sha256),
        "repr-digest": f"sha-256=:{digest}:",
        "x-content-type-options": "nosniff",
    }
    if part.partial:
        headers["content-range"] = f"bytes {part.start}-{part.end - 1}/{file.bytes}"
    return headers


def media_type(path: str) -> str:
    """Name the media type of a result file."""
    for suffix, kind in _MEDIA_TYPES.items():
        if path.endswith(suffix):
            return kind
    return "text/plain; charset=utf-8"
