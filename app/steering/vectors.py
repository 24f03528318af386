"""Stored vectors: numbers kept once an account, named by what they are.

A vector's name is its content address: "sv_" + sha256 over dtype, shape and bytes. The table
`vectors` holds the bytes, little-endian and in C order; requests and interventions carry names
only. Storing the same numbers twice changes nothing.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from uuid import UUID

import numpy as np
import numpy.typing as npt

from app.errors import ConflictError
from app.kit.db import Conn

PREFIX = "sv_"
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_HEX = frozenset("0123456789abcdef")
# Rows of one INSERT: a vector is at most 8 MiB, so this bounds what one statement carries.
_STATEMENT_BYTES = 32 * 1024**2


@dataclass(frozen=True)
class Vector:
    """Finite numbers of a Steering vector: `data` is little-endian, in C order, of `shape`.

    The last axis is the width of the site. bfloat16 numbers are 16-bit patterns.
    """

    dtype: str  # "float32" | "bfloat16"
    shape: tuple[int, ...]
    data: bytes

    @cached_property
    def digest(self) -> bytes:
        """Hash dtype, shape and bytes (sha256, 32 bytes)."""
        digest = hashlib.sha256(f"{self.dtype} {list(self.shape)}\n".encode())
        digest.update(self.data)
        return digest.digest()

    @property
    def name(self) -> str:
        """Name the vector by its content: "sv_" and 64 hexadecimal digits."""
        return PREFIX + self.digest.hex()

    @cached_property
    def largest(self) -> float:
        """Give the largest absolute value of its numbers."""
        values = self.to_float32()
        return float(np.abs(values).max()) if values.size else 0.0

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Give the numbers as float32 in their shape (exact for bfloat16 too)."""
        if self.dtype == "float32":
            return np.frombuffer(self.data, dtype="<f4").reshape(self.shape)
        bits = np.frombuffer(self.data, dtype="<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(self.shape)


def digest_of(name: str) -> bytes | None:
    """Read the digest from a vector's name; None when it is not such a name."""
    digits = name.removeprefix(PREFIX)
    if len(name) != len(PREFIX) + 64 or len(digits) != 64 or not set(digits) <= _HEX:
        return None
    return bytes.fromhex(digits)


def store_vectors(conn: Conn, account_id: UUID, vectors: Iterable[Vector]) -> None:
    """Store vectors that the account does not have yet; the others are left as they are.

    Names are written in one order, so that two Jobs with the same vectors cannot deadlock. None
    of them can be deleted before the transaction ends.
    """
    ordered = sorted({vector.digest: vector for vector in vectors}.items())
    known = _hold_known(conn, account_id, [digest for digest, _ in ordered])
    batch: list[Vector] = []
    size = 0
    for digest, vector in ordered:
        if digest in known:
            continue
        if batch and size + len(vector.data) > _STATEMENT_BYTES:
            _insert(conn, account_id, batch)
            batch, size = [], 0
        batch.append(vector)
        size += len(vector.data)
    if batch:
        _insert(conn, account_id, batch)


def link_vectors(conn: Conn, account_id: UUID, job_id: UUID, names: Collection[str]) -> None:
    """Note which stored vectors a Job uses; they cannot be deleted while it lives.

    Raises ConflictError (code `vector_deleted`) when one was deleted since the Job was validated.
    """
    digests = sorted(map(_digest, names))
    held = _hold_known(conn, account_id, digests)
    gone = [digest for digest in digests if digest not in held]
    if gone:
        msg = (
            f"The vector {PREFIX}{gone[0].hex()} was deleted while this Job was being stored. "
            "Store the vector again, or leave it out; then send the Job again."
        )
        raise ConflictError(msg, code="vector_deleted")
    conn.execute(
        """
        INSERT INTO job_vectors (job_id, account_id, digest)
        SELECT %s, %s, digest FROM unnest(%s::bytea[]) AS used (digest)
        """,
        (job_id, account_id, digests),
    )


def find_vectors(conn: Conn, account_id: UUID, names: Collection[str]) -> dict[str, Vector]:
    """Read the vectors of the account that have these names; missing ones are left out."""
    digests = sorted(digest for name in set(names) if (digest := digest_of(name)) is not None)
    if not digests:
        return {}
    rows = conn.execute(
        """
        SELECT digest, dtype, shape, data FROM vectors
        WHERE account_id = %s AND digest = ANY(%s)
        """,
        (account_id, digests),
        binary=True,
    )
    return {
        PREFIX + row["digest"].hex(): Vector(row["dtype"], tuple(row["shape"]), row["data"])
        for row in rows
    }


def vectors_size(conn: Conn, account_id: UUID, names: Collection[str]) -> int:
    """Sum the bytes of the vectors of the account that have these names, without reading them."""
    digests = sorted(digest for name in set(names) if (digest := digest_of(name)) is not None)
    row = conn.execute(
        """
        SELECT coalesce(sum(octet_length(data)), 0)::bigint AS bytes FROM vectors
        WHERE account_id = %s AND digest = ANY(%s)
        """,
        (account_id, digests),
    ).fetchone()
    return int(row["bytes"]) if row else 0


def read_vectors(
    conn: Conn, account_id: UUID, names: Collection[str]
) -> dict[str, npt.NDArray[np.float32]]:
    """Read the numbers of vectors as float32 [rows, width]; missing names are left out."""
    return {
        name: vector.to_float32().reshape(-1, vector.shape[-1])
        for name, vector in find_vectors(conn, account_id, names).items()
    }


def find_vector(conn: Conn, account_id: UUID, name: str) -> Vector | None:
    """Read one vector of the account, or None."""
    return find_vectors(conn, account_id, [name]).get(name)


def _hold_known(conn: Conn, account_id: UUID, digests: list[bytes]) -> set[bytes]:
    """Say which vectors there are, and keep them from being deleted until the transaction ends."""
    rows = conn.execute(
        """
        SELECT digest FROM vectors WHERE account_id = %s AND digest = ANY(%s)
        ORDER BY digest FOR KEY SHARE
        """,
        (account_id, digests),
    )
    return {row["digest"] for row in rows}


def _insert(conn: Conn, account_id: UUID, vectors: list[Vector]) -> None:
    """Insert vectors; one that somebody stored meanwhile is held as if it had been known.

    DO NOTHING would leave such a row unlocked, and a deletion could come before the link to it.
    """
    conn.execute(
        """
        INSERT INTO vectors (account_id, digest, dtype, shape, data)
        SELECT %(account_id)s, digest, dtype, shape::integer[], data
        FROM unnest(%(digests)s::bytea[], %(dtypes)s::text[], %(shapes)s::text[], %(data)b::bytea[])
            AS vector (digest, dtype, shape, data)
        ON CONFLICT (account_id, digest) DO UPDATE SET dtype = vectors.dtype
        """,
        {
            "account_id": account_id,
            "digests": [vector.digest for vector in vectors],
            "dtypes": [vector.dtype for vector in vectors],
            # Postgres has no arrays of arrays of different lengths: each shape travels as text.
            "shapes": ["{" + ",".join(map(str, vector.shape)) + "}" for vector in vectors],
            "data": [vector.data for vector in vectors],
        },
    )


def _digest(name: str) -> bytes:
    digest = digest_of(name)
    if digest is None:
        msg = f"not the name of a vector: {name!r}"
        raise ValueError(msg)
    return digest
