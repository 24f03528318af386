"""Public ids: a prefix that says what the thing is, and 32 hexadecimal digits.

The database stores the bare UUID (16 bytes; a Job of 10 million requests repeats it 10 million
times). UUIDs are version 7, so rows of one Job lie together in every index.
"""

import secrets
import time
import uuid
from typing import Literal

Kind = Literal["acct", "key", "job", "req", "worker"]


def new_uuid() -> uuid.UUID:
    """Make a time-ordered UUID (RFC 9562, version 7)."""
    millis = time.time_ns() // 1_000_000
    value = (millis & 0xFFFF_FFFF_FFFF) << 80
    value |= 0x7 << 76
    value |= secrets.randbits(12) << 64
    value |= 0b10 << 62
    value |= secrets.randbits(62)
    return uuid.UUID(int=value)


def public_id(kind: Kind, value: uuid.UUID) -> str:
    """Write a UUID as users see it, for example `job_0191…`."""
    return f"{kind}_{value.hex}"


def parse_id(kind: Kind, text: str) -> uuid.UUID | None:
    """Read a public id; None when it is not one of this kind (the caller answers 404)."""
    prefix, _, digits = text.partition("_")
    if prefix != kind or len(digits) != 32 or not set(digits) <= set("0123456789abcdef"):
        return None
    return uuid.UUID(hex=digits)
