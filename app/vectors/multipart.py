"""Splits a multipart/form-data body, which is in memory whole and capped, into its fields.

Only what forms and HTTP clients send is read: one level, a name for every part, no transfer
encodings (RFC 7578 deprecates them).
"""

import re
from email.message import Message
from email.parser import HeaderParser
from typing import Final

from app.completions.problems import RefusedError, shown

PARTS_MAX: Final = 8
HEADER_BYTES_MAX: Final = 4096
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")


def read_form(body: bytes, content_type: str) -> dict[str, bytes]:
    """Give the content of every part by its name. Raises RefusedError."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary):
        msg = "is multipart/form-data, but its content-type names no boundary"
        raise RefusedError(msg)
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), PARTS_MAX + 1)
    if len(parts) < 3 or not parts[-1].startswith(b"--"):
        cut = len(parts) < PARTS_MAX + 2
        what = "is cut or has no part" if cut else f"has more than {PARTS_MAX} parts"
        msg = f"is multipart/form-data that {what}"
        raise RefusedError(msg)
    fields: dict[str, bytes] = {}
    for part in parts[1:-1]:
        name, content = _part(part)
        if name in fields:
            msg = f"has the form field {shown(name)} more than once"
            raise RefusedError(msg)
        fields[name] = content
    return fields


def _part(part: bytes) -> tuple[str, bytes]:
    head, blank, content = part.partition(b"\r\n\r\n")
    lines = head.lstrip(b" \t")
    if not blank or not lines.startswith(b"\r\n") or len(head) > HEADER_BYTES_MAX:
        msg = "has a form part without headers, or with headers that are too long"
        raise RefusedError(msg)
    try:
        headers = HeaderParser().parsestr(lines[2:].decode("utf-8"))
    except ValueError:
        msg = "has a form part whose headers are not UTF-8"
        raise RefusedError(msg) from None
    name = headers.get_param("name", header="content-disposition")
    if headers.get_content_disposition() != "form-data" or not isinstance(name, str):
        msg = "has a form part without a name"
        raise RefusedError(msg)
    if str(headers.get("content-transfer-encoding", "binary")).lower() not in ("binary", "8bit"):
        msg = f"has the form field {shown(name)} in a transfer encoding; send its bytes as they are"
        raise RefusedError(msg)
    return name, content
