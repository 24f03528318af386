"""The entries of an account, page by page: every grant, charge and release, as they were written.

Entries are never changed, so a page that was read once stays as it is.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from app.kit.db import Conn
from app.kit.ids import public_id
from app.kit.pages import PageQuery

_ID = re.compile(r"entry_([1-9][0-9]{0,17})")
_SIGNS = {"grant": 1, "reversal": -1, "settle": -1, "release": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry; `hold_amount` and the rest say which Hold it resolved, if any."""

    id: int
    kind: str
    amount: int
    clipped: int
    note: str | None
    created_at: datetime
    hold_amount: int | None
    job_id: UUID | None
    request_index: int | None
    completion_id: UUID | None


def list_entries(conn: Conn, account_id: UUID, page: PageQuery) -> list[Entry] | None:
    """List entries, one more than asked for when there are more; None for an unknown `after`."""
    after: int | None = None
    if page.after is not None:
        match = _ID.fullmatch(page.after)
        if match is None:
            return None
        after = int(match[1])
        known = conn.execute(
            "SELECT 1 FROM entries WHERE id = %s AND account_id = %s", [after, account_id]
        )
        if known.fetchone() is None:
            return None
    values = {"account_id": account_id, "after": after, "limit": page.limit + 1}
    query = _ASCENDING if page.order == "asc" else _DESCENDING
    return [Entry(**row) for row in conn.execute(query, values)]


# The page is cut before Holds are looked up: each costs one step in an index, whatever the total.
_ASCENDING = """
    SELECT page.id, kind, page.amount, clipped, note, page.created_at,
        holds.amount AS hold_amount, job_id, request_index, completion_id
    FROM (
        SELECT id, kind, amount, clipped, note, created_at, hold_id FROM entries
        WHERE account_id = %(account_id)s AND (%(after)s::bigint IS NULL OR id > %(after)s::bigint)
        ORDER BY id LIMIT %(limit)s
    ) AS page
    LEFT JOIN holds ON holds.id = page.hold_id ORDER BY page.id
"""
_DESCENDING = """
    SELECT page.id, kind, page.amount, clipped, note, page.created_at,
        holds.amount AS hold_amount, job_id, request_index, completion_id
    FROM (
        SELECT id, kind, amount, clipped, note, created_at, hold_id FROM entries
        WHERE account_id = %(account_id)s AND (%(after)s::bigint IS NULL OR id < %(after)s::bigint)
        ORDER BY id DESC LIMIT %(limit)s
    ) AS page
    LEFT JOIN holds ON holds.id = page.hold_id ORDER BY page.id DESC
"""


def entry_object(entry: Entry) -> dict[str, Any]:
    """Write an entry as the API shows it."""
    job = None if entry.job_id is None else public_id("job", entry.job_id)
    completion = None if entry.completion_id is None else f"cmpl-{entry.completion_id.hex}"
    return {
        "id": f"entry_{entry.id}",
        "object": "ledger.entry",
        "kind": entry.kind,
        "tokens": entry.amount,
        "balance_change": _SIGNS[entry.kind] * entry.amount,
        "tokens_held": entry.hold_amount,
        "clipped": entry.clipped,
        "job_id": job,
        "request_index": entry.request_index,
        "completion_id": completion,
        "note": entry.note,
        "created_at": int(entry.created_at.timestamp()),
    }
