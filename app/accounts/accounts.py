"""Accounts and their keys: create, list, revoke. Balances belong to app/ledger/holds.py."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.accounts.keys import Role, key_digest, mint_key
from app.kit.db import Conn
from app.kit.ids import new_uuid

SCOPES = frozenset({"completions", "jobs:read", "jobs:write", "vectors", "admin"})
USER_SCOPES = SCOPES - {"admin"}


@dataclass(frozen=True, slots=True)
class MintedKey:
    """A new key; `secret` exists only here and in the user's hands."""

    id: UUID
    account_id: UUID
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """A key as lists show it."""

    id: UUID
    account_id: UUID
    name: str
    last4: str
    scopes: frozenset[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    role: Role | None
    is_expired: bool


def create_account(conn: Conn, name: str) -> UUID:
    """Create an account without tokens; return its id."""
    account_id = new_uuid()
    conn.execute("INSERT INTO accounts (id, name) VALUES (%s, %s)", [account_id, name])
    return account_id


def find_account(conn: Conn, name: str) -> UUID | None:
    """Find the oldest account of that name."""
    row = conn.execute(
        "SELECT id FROM accounts WHERE name = %s ORDER BY id LIMIT 1", [name]
    ).fetchone()
    return None if row is None else row["id"]


def create_key(
    conn: Conn,
    account_id: UUID,
    pepper: str,
    *,
    name: str,
    scopes: Collection[str] = USER_SCOPES,
    expires_at: datetime | None = None,
    role: Role | None = None,
) -> MintedKey:
    """Create a key of an account; one with the scope admin has a role, admin unless told.

    Raises ValueError for a scope that does not exist, and for a role without the scope admin.
    """
    unknown = set(scopes) - SCOPES
    if unknown or not scopes:
        msg = f"scopes must be some of {sorted(SCOPES)}, not {sorted(scopes)}"
        raise ValueError(msg)
    if "admin" in scopes:
        role = role or "admin"
    elif role is not None:
        msg = f"the role {role} needs the scope admin; the scopes are {sorted(scopes)}"
        raise ValueError(msg)
    key_id, secret = new_uuid(), mint_key()
    conn.execute(
        """
        INSERT INTO api_keys (id, account_id, name, digest, last4, scopes, expires_at, role)
        VALUES (%s, %s, %s, %s, %s, %s, %s, %s)
        """,
        [
            *(key_id, account_id, name, key_digest(secret, pepper)),
            *(secret[-4:], sorted(scopes), expires_at, role),
        ],
    )
    return MintedKey(key_id, account_id, secret)


def list_keys(
    conn: Conn, account_id: UUID, *, before: UUID | None = None, limit: int | None = None
) -> list[KeyRow]:
    """List the keys of an account, newest first, revoked ones too: those made before `before`."""
    rows = conn.execute(
        """
        SELECT id, account_id, name, last4, scopes, created_at, expires_at, revoked_at, role,
            coalesce(expires_at <= now(), false) AS is_expired
        FROM api_keys
        WHERE account_id = %(account_id)s AND (%(before)s::uuid IS NULL OR id < %(before)s)
        ORDER BY id DESC LIMIT %(limit)s
        """,
        {"account_id": account_id, "before": before, "limit": limit},
    ).fetchall()
    return [KeyRow(**{**row, "scopes": frozenset(row["scopes"])}) for row in rows]


def revoke_key(conn: Conn, account_id: UUID, key_id: UUID) -> bool:
    """Revoke a key at once; False when the account has no such key that is still valid."""
    moved = conn.execute(
        """
        UPDATE api_keys SET revoked_at = now()
        WHERE id = %s AND account_id = %s AND revoked_at IS NULL
        """,
        [key_id, account_id],
    )
    return moved.rowcount == 1
