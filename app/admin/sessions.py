"""Sessions of the dashboard: begun by an admin key, ended by logout, age, idleness or revocation.

Only the digest of a cookie's token is stored. A session is looked up together with its key, so
whatever ends the key ends its sessions in the same moment; the role is read anew each time.
"""

import secrets
from dataclasses import dataclass
from uuid import UUID

from app.accounts.keys import Role, key_digest
from app.kit.db import Conn
from app.kit.ids import new_uuid

SEEN_SECONDS = 60.0  # a page that asks every second does not write every second
KEPT_DAYS = 30  # sessions that are over are listed for so long


@dataclass(frozen=True, slots=True)
class FoundSession:
    """A session that is open now, and what its key says."""

    id: UUID
    key_id: UUID
    name: str
    role: Role


def begin_session(
    conn: Conn, key_id: UUID, *, pepper: str, session_seconds: float
) -> tuple[UUID, str]:
    """Begin a session with a new token; return its id and the token, which is stored nowhere."""
    conn.execute(
        "DELETE FROM admin_sessions WHERE expires_at < now() - make_interval(days => %s)",
        [KEPT_DAYS],
    )
    session_id, token = new_uuid(), secrets.token_urlsafe(32)
    conn.execute(
        """
        INSERT INTO admin_sessions (id, key_id, digest, expires_at)
        VALUES (%s, %s, %s, now() + make_interval(secs => %s))
        """,
        [session_id, key_id, key_digest(token, pepper), session_seconds],
    )
    return session_id, token


def find_session(
    conn: Conn, digest: bytes, *, idle_seconds: float, note_seen: bool = True
) -> FoundSession | None:
    """Find an open session by the digest of its token; note that it was seen, unless told not."""
    row = conn.execute(
        """
        SELECT admin_sessions.id, key_id, name, role,
            last_seen_at < now() - make_interval(secs => %(seen)s) AS seen_long_ago
        FROM admin_sessions JOIN api_keys ON api_keys.id = key_id
        WHERE admin_sessions.digest = %(digest)s AND ended_at IS NULL
            AND admin_sessions.expires_at > now()
            AND last_seen_at > now() - make_interval(secs => %(idle)s)
            AND role IS NOT NULL AND revoked_at IS NULL
            AND (api_keys.expires_at IS NULL OR api_keys.expires_at > now())
        """,
        {
            "digest": digest,
            "idle": idle_seconds,
            "seen": min(SEEN_SECONDS, idle_seconds / 4),
        },
    ).fetchone()
    if row is None:
        return None
    if note_seen and row["seen_long_ago"]:
        conn.execute("UPDATE admin_sessions SET last_seen_at = now() WHERE id = %s", [row["id"]])
    return FoundSession(row["id"], row["key_id"], row["name"], row["role"])


def end_session(conn: Conn, session_id: UUID) -> bool:
    """End a session; False when it was over."""
    ended = conn.execute(
        "UPDATE admin_sessions SET ended_at = now() WHERE id = %s AND ended_at IS NULL",
        [session_id],
    )
    return ended.rowcount == 1


def end_sessions_of_key(conn: Conn, key_id: UUID) -> int:
    """End every session that a key began; count them."""
    ended = conn.execute(
        "UPDATE admin_sessions SET ended_at = now() WHERE key_id = %s AND ended_at IS NULL",
        [key_id],
    )
    return ended.rowcount
