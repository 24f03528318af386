"""API keys: how they are made, recognised and looked up.

A key is `sk_live_`, 64 hexadecimal digits of chance and 8 of their CRC-32 (secret scanners and
typing errors are told apart without a database). Only HMAC-SHA-256 under the pepper is stored: a
copy of the database opens nothing. A slow hash would add nothing to 256 random bits.
"""

import hashlib
import hmac
import re
import secrets
import zlib
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from app.kit.db import Conn

# What a key with the scope admin may do at the dashboard, from the least to the most.
Role = Literal["read-only", "operator", "admin"]
PREFIX = "sk_live_"
_FORM = re.compile(r"sk_live_([0-9a-f]{64})([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class FoundKey:
    """A key that is neither revoked nor expired; `role` is None without the scope admin."""

    id: UUID
    account_id: UUID
    scopes: frozenset[str]
    name: str
    role: Role | None


def mint_key() -> str:
    """Make a new key; show it once, store only its digest."""
    chance = secrets.token_hex(32)
    return f"{PREFIX}{chance}{zlib.crc32(chance.encode()):08x}"


def is_well_formed(key: str) -> bool:
    """Tell whether `key` has our form and its checksum is right."""
    match = _FORM.fullmatch(key)
    return match is not None and f"{zlib.crc32(match[1].encode()):08x}" == match[2]


def key_digest(key: str, pepper: str) -> bytes:
    """Compute the 32 bytes that stand for `key` in the database."""
    return hmac.new(pepper.encode(), key.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()


def find_key(conn: Conn, digest: bytes) -> FoundKey | None:
    """Find a key that is valid now (database clock) by its digest."""
    row = conn.execute(
        """
        SELECT id, account_id, scopes, name, role FROM api_keys
        WHERE digest = %s AND revoked_at IS NULL
            AND (expires_at IS NULL OR expires_at > now())
        """,
        [digest],
    ).fetchone()
    if row is None:
        return None
    return FoundKey(**{**row, "scopes": frozenset(row["scopes"])})
