"""Reads a JSON body: strict, bounded and quick (orjson, about 300 MB/s).

Refused besides bad syntax: NaN and Infinity, numbers too large for a double, a BOM, anything but
UTF-8, keys that come twice, NUL characters and lone surrogates (Postgres refuses both), nesting
over the limit, more lists and objects than allowed (counted before a single one is made), and a
body that is not an object. Whole numbers stay int, all others are float.
"""

import gc
import json
import threading
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson

from app.errors import InvalidRequestError

LARGE = 64  # items of a list that is first asked whether it holds anything but numbers and texts
SLICE_BYTES: Final = 1024 * 1024  # looked at in one go: other threads run in between
_QUOTE: Final = ord('"')
_NO_MARKS: Final = bytes(set(range(256)) - set(b'"[{'))


def read_object(body: bytes, *, depth_max: int, containers_max: int) -> dict[str, Any]:
    """Parse a body that must be one JSON object of at most `containers_max` lists and objects.

    Raises InvalidRequestError (code `bad_json`) saying what is wrong and where.
    """
    if not body.strip():
        msg = "The body is empty. Send a JSON object."
        raise InvalidRequestError(msg, code="bad_json")
    _refuse_containers(body, containers_max)
    with _NO_COLLECTION:
        return _read(body, depth_max)


def count_containers(body: bytes) -> int:
    """Count the lists and objects of a JSON text without parsing it; brackets in texts are none."""
    # Without escaped backslashes and quotes, every quote that is left begins or ends a text.
    marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, delete=_NO_MARKS)
    found, is_inside = 0, False
    for start in range(0, len(marks), SLICE_BYTES):
        part = np.frombuffer(marks[start : start + SLICE_BYTES], dtype=np.uint8)
        quotes = part == _QUOTE
        inside = np.logical_xor.accumulate(quotes) ^ is_inside
        found += int(np.count_nonzero(~(quotes | inside)))
        is_inside = bool(inside[-1])
    return found


def _refuse_containers(body: bytes, most: int) -> None:
    """Refuse a body of tiny containers: each of its bytes would become some fifty in memory."""
    if len(body) <= most or body.count(b"[") + body.count(b"{") <= most:
        return
    found = count_containers(body)
    if found > most:
        msg = (
            f"The body holds {found} lists and objects; at most {most} are allowed. Send vectors "
            "in the encoded form, or less in one request."
        )
        raise InvalidRequestError(msg, code="bad_json")


class _NoCollection:
    """Keeps the garbage collector out: millions of lists, none of them in a cycle, wake it often.

    Of the threads that overlap here the last leaves it as the first found it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._was_enabled:
                gc.enable()


_NO_COLLECTION = _NoCollection()


def _read(body: bytes, depth_max: int) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        msg = f"The body is not valid JSON: {_one_line(str(error))}.{_hint(error)}"
        raise InvalidRequestError(msg, code="bad_json") from None
    if not isinstance(value, dict):
        msg = f"The body is {_kind(value)}. Send a JSON object."
        raise InvalidRequestError(msg, code="bad_json")
    _refuse_depth(value, depth_max)
    _refuse_twins_and_nul(body, value)
    return value


def _refuse_depth(value: dict[str, Any], depth_max: int) -> None:
    """Go down level by level; plain numbers are passed over at the speed of C."""
    level: list[dict[str, Any] | list[Any]] = [value]
    for _ in range(depth_max):
        level = _containers(level)
        if not level:
            return
    msg = f"The body is nested deeper than {depth_max} levels."
    raise InvalidRequestError(msg, code="bad_json")


def _containers(level: list[dict[str, Any] | list[Any]]) -> list[dict[str, Any] | list[Any]]:
    """List what is inside a level; no call a node, as a body may hold millions of tiny ones."""
    groups = [node if isinstance(node, list) else node.values() for node in level if node]
    large = [
        group
        for group in groups
        if len(group) > LARGE and not {dict, list}.isdisjoint(map(type, group))
    ]
    small = [group for group in groups if len(group) <= LARGE]
    children = chain.from_iterable(chain(small, large))
    return [child for child in children if type(child) is list or type(child) is dict]


def _refuse_twins_and_nul(body: bytes, value: dict[str, Any]) -> None:
    """Refuse keys that come twice (orjson keeps the last) and NUL characters.

    Written again, the parsed value has as many colons as the body unless a key was dropped; an
    escaped colon spoils the count, and then the slow reader decides.
    """
    again = orjson.dumps(value)
    if again.count(b":") != body.count(b":") or b"\\u003" in body:
        json.loads(body, object_pairs_hook=_refuse_twins)
    if b"\\u0000" in again and any("\0" in text for text in _strings(value)):
        msg = "The body holds a NUL character (\\u0000). Leave it out."
        raise InvalidRequestError(msg, code="bad_json")


def _refuse_twins(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            msg = f"The key {key[:100]!r} comes twice in one object of the body."
            raise InvalidRequestError(msg, code="bad_json")
        seen.add(key)


def _strings(value: object) -> Iterator[str]:
    nodes = [value]
    while nodes:
        node = nodes.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            nodes.extend(node.keys())
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _hint(error: orjson.JSONDecodeError) -> str:
    """Say what to do about what other writers of JSON let through."""
    there = error.doc[error.pos : error.pos + 3].lower()
    is_odd = there in ("nan", "inf")
    return " JSON has no NaN and no Infinity: send finite numbers." if is_odd else ""


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")[:200]
