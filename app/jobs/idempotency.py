"""One answer for one Idempotency-Key of an account, whatever order the requests arrive in.

The key is written in the transaction that does the work, so both appear together or not at all.
A second request with the same key waits on the first one's row and then replays its answer.
"""

import hashlib
from dataclasses import dataclass
from uuid import UUID

from psycopg import errors as pg
from psycopg.types.json import Jsonb

from app.errors import ConflictError, IdempotencyKeyReusedError, InvalidRequestError
from app.kit.db import Conn


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The first answer under a key, byte for byte."""

    status: int
    body: str


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A key as sent, and what was sent with it."""

    key: str
    fingerprint: bytes


def read_key(
    headers: list[str], route: str, body: bytes, *, chars_max: int
) -> IdempotencyKey | None:
    """Read the Idempotency-Key headers of a request. Raises InvalidRequestError."""
    if not headers:
        return None
    key = headers[0]
    is_good = 0 < len(key) <= chars_max and key.isascii() and key.isprintable()
    if len(headers) > 1 or not is_good:
        msg = (
            f"Idempotency-Key must be sent once and be 1 to {chars_max} printable ASCII characters."
        )
        raise InvalidRequestError(msg, param="Idempotency-Key")
    digest = hashlib.sha256(f"{route}\n".encode())
    digest.update(body)
    return IdempotencyKey(key, digest.digest())


def find_answer(conn: Conn, account_id: UUID, key: IdempotencyKey) -> StoredAnswer | None:
    """Find the answer that was given under this key.

    Raises IdempotencyKeyReusedError when the key came with another body.
    """
    row = conn.execute(
        """
        SELECT fingerprint, status, answer FROM idempotency_keys
        WHERE account_id = %s AND key = %s
        """,
        (account_id, key.key),
    ).fetchone()
    if row is None:
        return None
    if bytes(row["fingerprint"]) != key.fingerprint:
        msg = (
            "This Idempotency-Key came before with another body. Send the same body to get the "
            "first answer again, or a new key for something new."
        )
        raise IdempotencyKeyReusedError(msg, param="Idempotency-Key")
    return StoredAnswer(row["status"], row["answer"])


def claim_key(conn: Conn, account_id: UUID, key: IdempotencyKey) -> StoredAnswer | None:
    """Take the key for this transaction, or give the answer of the one that had it before.

    Waits for a transaction that is working under the same key; raises ConflictError (code
    `idempotency_in_progress`) when that takes too long.
    """
    try:
        taken = conn.execute(
            """
            INSERT INTO idempotency_keys (account_id, key, fingerprint) VALUES (%s, %s, %s)
            ON CONFLICT DO NOTHING
            """,
            (account_id, key.key, key.fingerprint),
        )
    except pg.LockNotAvailable:
        msg = "A request with this Idempotency-Key is still being worked on. Send it again."
        raise ConflictError(msg, code="idempotency_in_progress", retry_after=2) from None
    if taken.rowcount == 1:
        return None
    answer = find_answer(conn, account_id, key)
    assert answer is not None, "the row that we ran into is committed"
    return answer


def keep_answer(conn: Conn, account_id: UUID, key: IdempotencyKey, answer: StoredAnswer) -> None:
    """Store the answer under the key that this transaction took."""
    conn.execute(
        "UPDATE idempotency_keys SET status = %s, answer = %s WHERE account_id = %s AND key = %s",
        (answer.status, Jsonb(answer.body), account_id, key.key),
    )
