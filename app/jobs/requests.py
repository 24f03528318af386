"""The read side of the requests of a Job: pages in index order, and single ones.

A request that is not terminal is stored as pending; it is shown as running while the shard that
holds it is leased.
"""

from typing import Any
from uuid import UUID

from app.jobs.states import RequestState
from app.kit.db import Conn
from app.kit.ids import public_id


def list_requests(
    conn: Conn,
    job_id: UUID,
    *,
    after: int,
    limit: int,
    state: str | None = None,
    custom_id: str | None = None,
) -> list[dict[str, Any]]:
    """List requests behind index `after`, one more than `limit` when there are more."""
    rows = conn.execute(
        """
        SELECT * FROM (
            SELECT r.request_index, r.custom_id, r.version, r.prompt_tokens, r.completion_tokens,
                r.attempt, r.error_code, r.error_message, r.finished_at, holds.amount,
                CASE WHEN r.state = 'pending' AND (
                    SELECT s.state = 'leased' AND r.request_index < s.end_index FROM shards s
                    WHERE s.job_id = r.job_id AND s.first_index <= r.request_index
                    ORDER BY s.first_index DESC LIMIT 1
                ) THEN 'running' ELSE r.state END AS state
            FROM requests r
            LEFT JOIN holds ON holds.job_id = r.job_id
                AND holds.request_index = r.request_index AND holds.version = r.version
            WHERE r.job_id = %(job_id)s AND r.request_index > %(after)s
                AND (%(custom_id)s::text IS NULL OR r.custom_id = %(custom_id)s)
                AND (%(stored)s::text IS NULL OR r.state = %(stored)s)
        ) AS seen
        WHERE %(state)s::text IS NULL OR state = %(state)s
        ORDER BY request_index LIMIT %(limit)s
        """,
        {
            "job_id": job_id,
            "after": after,
            "state": state,
            "stored": RequestState.pending if state == RequestState.running else state,
            "custom_id": custom_id,
            "limit": limit + 1,
        },
    )
    return [_request_object(job_id, row) for row in rows]


def find_request(conn: Conn, job_id: UUID, index: int) -> dict[str, Any] | None:
    """Read one request with what it asked for and how its Hold was resolved."""
    found = list_requests(conn, job_id, after=index - 1, limit=0)
    if not found or found[0]["request_index"] != index:
        return None
    row = conn.execute(
        """
        SELECT r.spec, entries.kind, entries.amount FROM requests r
        LEFT JOIN holds ON holds.job_id = r.job_id
            AND holds.request_index = r.request_index AND holds.version = r.version
        LEFT JOIN entries ON entries.hold_id = holds.id
        WHERE r.job_id = %s AND r.request_index = %s
        """,
        (job_id, index),
    ).fetchone()
    assert row is not None
    held = found[0]["tokens_held"]
    states = {None: "open", "settle": "settled", "release": "released"}
    hold = {
        "amount": held,
        "state": states[row["kind"]],
        "charged": row["amount"] if row["kind"] == "settle" else 0,
    }
    return {**found[0], "hold": hold, "spec": row["spec"]}


def request_id(job_id: UUID, index: int) -> str:
    """Name a request of a Job: it is unique, and lists use it as their cursor."""
    return f"{public_id('job', job_id)}-{index}"


def read_index(text: str) -> int | None:
    """Read the index of a request; None unless it is written as lists write it."""
    # isdecimal alone would let other scripts' digits and leading zeros through.
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_number and str(int(text)) == text else None


def index_of(job_id: UUID, name: str) -> int | None:
    """Read the index from a request's name; None when it is not one of this Job."""
    prefix, _, digits = name.rpartition("-")
    return read_index(digits) if prefix == public_id("job", job_id) else None


def _request_object(job_id: UUID, row: dict[str, Any]) -> dict[str, Any]:
    error = None
    if row["error_code"] is not None:
        error = {"code": row["error_code"], "message": row["error_message"]}
    return {
        "id": request_id(job_id, row["request_index"]),
        "object": "job.request",
        "job_id": public_id("job", job_id),
        "request_index": row["request_index"],
        "custom_id": row["custom_id"],
        "status": row["state"],
        "version": row["version"],
        "attempt": row["attempt"],
        "prompt_tokens": row["prompt_tokens"],
        "completion_tokens": row["completion_tokens"],
        "tokens_held": row["amount"],
        "error": error,
        "finished_at": None if row["finished_at"] is None else int(row["finished_at"].timestamp()),
    }
