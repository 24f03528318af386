"""The rows of `vectors` as users see them: stored, listed, described, deleted.

A vector is what its numbers are: storing them again finds the same row. It is deleted only while
no live Job uses it. A Job that is being stored holds the rows it uses (FOR KEY SHARE), a deletion
takes its row (FOR UPDATE), so one of the two is always first and the other sees what it did.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import numpy as np
from psycopg import errors as pg
from psycopg.types.json import Jsonb

from app.errors import ConflictError
from app.kit.db import Conn
from app.kit.ids import public_id
from app.kit.pages import PageQuery
from app.steering.vectors import PREFIX, Vector, digest_of, find_vector
from app.vectors.upload import Upload

NORMS_MAX: Final = 4096  # of more rows only the first have their norm listed
_JOBS_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class StoredVector:
    """A stored vector without its numbers; `uploaded_at` is None when only Jobs brought it."""

    id: str
    name: str | None
    metadata: dict[str, str]
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    created_at: datetime
    uploaded_at: datetime | None


def store_upload(conn: Conn, account_id: UUID, upload: Upload) -> tuple[StoredVector, bool]:
    """Store an upload; tell whether its numbers are new here. Name and metadata sent last stay."""
    vector = upload.vector
    row = conn.execute(
        """
        INSERT INTO vectors AS v
            (account_id, digest, dtype, shape, data, name, metadata, uploaded_at)
        VALUES (%(account)s, %(digest)s, %(dtype)s, %(shape)s, %(data)b, %(name)s,
            COALESCE(%(metadata)s::jsonb, '{}'), now())
        ON CONFLICT (account_id, digest) DO UPDATE SET
            name = COALESCE(%(name)s, v.name),
            metadata = COALESCE(%(metadata)s::jsonb, v.metadata),
            uploaded_at = COALESCE(v.uploaded_at, now())
        RETURNING digest, name, metadata, dtype, shape, octet_length(data) AS bytes, created_at,
            uploaded_at, xmax = 0 AS is_new
        """,
        {
            "account": account_id,
            "digest": vector.digest,
            "dtype": vector.dtype,
            "shape": list(vector.shape),
            "data": vector.data,
            "name": upload.name,
            "metadata": None if upload.metadata is None else Jsonb(upload.metadata),
        },
    ).fetchone()
    assert row is not None
    # A row that this statement inserted was deleted or locked by nobody yet: its xmax is 0.
    return _from_row(row), row["is_new"]


def list_stored(
    conn: Conn, account_id: UUID, page: PageQuery, *, interned: bool | None
) -> list[StoredVector] | None:
    """List vectors, one more than asked for when there are more; None for an unknown `after`.

    `interned` chooses those that only Jobs brought along (true), or that were uploaded (false).
    """
    behind: Mapping[str, Any] = {"created_at": None, "digest": None}
    if page.after is not None:
        digest = digest_of(page.after)
        found = None
        if digest is not None:
            found = conn.execute(
                "SELECT created_at, digest FROM vectors WHERE account_id = %s AND digest = %s",
                (account_id, digest),
            ).fetchone()
        if found is None:
            return None
        behind = found
    values = {
        "account": account_id,
        "interned": interned,
        "after": page.after,
        "limit": page.limit + 1,
        "created_at": behind["created_at"],
        "digest": behind["digest"],
    }
    rows = conn.execute(_NEWEST_FIRST if page.order == "desc" else _OLDEST_FIRST, values)
    return [_from_row(row) for row in rows]


_NEWEST_FIRST: Final = """
    SELECT digest, name, metadata, dtype, shape, octet_length(data) AS bytes, created_at,
        uploaded_at
    FROM vectors
    WHERE account_id = %(account)s
        AND (%(interned)s::boolean IS NULL OR (uploaded_at IS NULL) = %(interned)s)
        AND (%(after)s::text IS NULL
            OR (created_at, digest) < (%(created_at)s::timestamptz, %(digest)s::bytea))
    ORDER BY created_at DESC, digest DESC LIMIT %(limit)s
"""
_OLDEST_FIRST: Final = """
    SELECT digest, name, metadata, dtype, shape, octet_length(data) AS bytes, created_at,
        uploaded_at
    FROM vectors
    WHERE account_id = %(account)s
        AND (%(interned)s::boolean IS NULL OR (uploaded_at IS NULL) = %(interned)s)
        AND (%(after)s::text IS NULL
            OR (created_at, digest) > (%(created_at)s::timestamptz, %(digest)s::bytea))
    ORDER BY created_at, digest LIMIT %(limit)s
"""


def find_stored(conn: Conn, account_id: UUID, name: str) -> tuple[StoredVector, Vector] | None:
    """Read a vector and its numbers, or None."""
    vector = find_vector(conn, account_id, name)
    if vector is None:
        return None
    row = conn.execute(
        """
        SELECT digest, name, metadata, dtype, shape, octet_length(data) AS bytes, created_at,
            uploaded_at
        FROM vectors WHERE account_id = %s AND digest = %s
        """,
        (account_id, vector.digest),
    ).fetchone()
    return None if row is None else (_from_row(row), vector)


def delete_stored(conn: Conn, account_id: UUID, name: str) -> bool:
    """Delete a vector; False when there is none. Finished Jobs that used it forget it.

    Raises ConflictError (code `vector_in_use`) while a live Job uses it.
    """
    digest = digest_of(name)
    if digest is None:
        return False
    try:
        found = conn.execute(
            "SELECT FROM vectors WHERE account_id = %s AND digest = %s FOR UPDATE",
            (account_id, digest),
        )
    except pg.LockNotAvailable:
        msg = f"A Job that uses {name} is being stored at this moment. Send it again."
        raise ConflictError(msg, code="vector_in_use", retry_after=2) from None
    if found.rowcount == 0:
        return False
    _refuse_in_use(conn, account_id, digest)
    conn.execute(
        "DELETE FROM job_vectors WHERE account_id = %s AND digest = %s", (account_id, digest)
    )
    conn.execute("DELETE FROM vectors WHERE account_id = %s AND digest = %s", (account_id, digest))
    return True


def _refuse_in_use(conn: Conn, account_id: UUID, digest: bytes) -> None:
    """Look for live Jobs in a statement of its own: it sees what the lock waited for."""
    jobs = conn.execute(
        """
        SELECT j.id FROM job_vectors l JOIN jobs j ON j.id = l.job_id
        WHERE l.account_id = %s AND l.digest = %s
            AND j.state NOT IN ('completed', 'failed', 'cancelled', 'expired')
        ORDER BY j.id LIMIT %s
        """,
        (account_id, digest, _JOBS_NAMED + 1),
    ).fetchall()
    if jobs:
        names = ", ".join(public_id("job", row["id"]) for row in jobs[:_JOBS_NAMED])
        more = " and more" if len(jobs) > _JOBS_NAMED else ""
        msg = (
            f"The vector {PREFIX}{digest.hex()} is used by unfinished Jobs: {names}{more}. Wait "
            "for them or cancel them, then delete it."
        )
        raise ConflictError(msg, code="vector_in_use")


def vector_object(stored: StoredVector) -> dict[str, Any]:
    """Write a stored vector as users see it in lists."""
    return {
        "id": stored.id,
        "object": "steering_vector",
        "name": stored.name,
        "dtype": stored.dtype,
        "shape": stored.shape,
        "bytes": stored.bytes,
        "interned": stored.uploaded_at is None,
        "metadata": stored.metadata,
        "created_at": int(stored.created_at.timestamp()),
    }


def vector_facts(vector: Vector) -> dict[str, Any]:
    """Describe the numbers: how many rows, the Euclidean norm of each, the largest number."""
    rows = vector.to_float32().reshape(-1, vector.shape[-1])
    listed = rows[:NORMS_MAX].astype(np.float64)
    return {
        "rows": len(rows),
        "norms": np.sqrt(np.einsum("ij,ij->i", listed, listed)).tolist(),
        "largest": vector.largest,
    }


def _from_row(row: Mapping[str, Any]) -> StoredVector:
    return StoredVector(
        id=PREFIX + bytes(row["digest"]).hex(),
        name=row["name"],
        metadata=row["metadata"],
        dtype=row["dtype"],
        shape=tuple(row["shape"]),
        bytes=row["bytes"],
        created_at=row["created_at"],
        uploaded_at=row["uploaded_at"],
    )
