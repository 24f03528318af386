"""Lists of Jobs: walked by key in the order of their submission, whatever is asked for.

A page follows one index and looks at SCAN_MAX Jobs at most. When that many were looked at and the
page is not full, it says how far it came, and the next page goes on there: a rare name is found in
a few pages, and no page is ever slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from app.admin.actions import JobFilter
from app.jobs.records import Job, job_from_row
from app.kit.db import Conn

PAGE: Final = 50
SCAN_MAX: Final = 5000


@dataclass(frozen=True, slots=True)
class JobRow:
    """A Job, and the name of the account that it belongs to."""

    job: Job
    account: str


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the order of Jobs: right behind the Job that was submitted then."""

    created_at: datetime
    id: UUID


@dataclass(frozen=True, slots=True)
class JobPage:
    """A page of Jobs; `next` is where the next one begins, None at the end.

    `looked_back_to` is set when the page ended because enough Jobs were looked at.
    """

    rows: Sequence[JobRow]
    next: Place | None
    looked_back_to: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSearch:
    """What a list asks for: a filter, Jobs that are not over, a range of ids (first and last)."""

    chosen: JobFilter
    unfinished: bool = False
    ids: tuple[UUID, UUID] | None = None


def list_jobs(
    conn: Conn, search: JobSearch, *, after: Place | None = None, scan_max: int = SCAN_MAX
) -> JobPage:
    """List Jobs that match, newest first, behind `after`."""
    values = _values(search, after, scan_max)
    found = conn.execute(
        """
        SELECT walk.*, accounts.name AS account FROM (
            SELECT * FROM jobs
            WHERE (%(by_account)s::uuid IS NULL OR account_id = %(by_account)s)
                AND (%(by_state)s::text IS NULL OR state = %(by_state)s)
                AND (%(by_model)s::text IS NULL OR model = %(by_model)s)
                AND (NOT %(by_unfinished)s OR finished_at IS NULL)
                AND (%(first)s::uuid IS NULL OR id BETWEEN %(first)s AND %(last)s)
                AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s)
                AND (%(until)s::timestamptz IS NULL OR created_at <= %(until)s)
                AND (%(after)s::uuid IS NULL OR (created_at, id) < (%(after_at)s, %(after)s))
            ORDER BY created_at DESC, id DESC LIMIT %(scan)s
        ) AS walk JOIN accounts ON accounts.id = account_id
        WHERE (%(state)s::text IS NULL OR state = %(state)s)
            AND (%(model)s::text IS NULL OR model = %(model)s)
            AND (%(name)s::text IS NULL OR strpos(lower(walk.name), lower(%(name)s)) > 0)
            AND (NOT %(unfinished)s OR finished_at IS NULL)
        ORDER BY walk.created_at DESC, walk.id DESC LIMIT %(limit)s
        """,
        values,
    ).fetchall()
    rows = [JobRow(job_from_row(row), row["account"]) for row in found[:PAGE]]
    if len(found) > PAGE:
        last = rows[-1].job
        return JobPage(rows, Place(last.created_at, last.id))
    end = _end_of_walk(conn, values)
    return JobPage(rows, end, end.created_at if end else None)


def live_jobs(conn: Conn, limit: int) -> list[JobRow]:
    """List the newest Jobs that are not over."""
    rows = conn.execute(
        """
        SELECT jobs.*, accounts.name AS account FROM jobs JOIN accounts ON accounts.id = account_id
        WHERE finished_at IS NULL ORDER BY jobs.created_at DESC, jobs.id DESC LIMIT %s
        """,
        [limit],
    )
    return [JobRow(job_from_row(row), row["account"]) for row in rows]


def _values(search: JobSearch, after: Place | None, scan_max: int) -> dict[str, Any]:
    """Bind a search. One condition chooses the index to walk; the others are checked on the way."""
    chosen = search.chosen
    account, state, model = chosen.account_id, chosen.state, chosen.model
    return {
        "by_account": account,
        "by_state": state if account is None else None,
        "by_unfinished": search.unfinished and account is None and state is None,
        "by_model": model if account is None and state is None and not search.unfinished else None,
        "state": state,
        "model": model,
        "name": chosen.name,
        "unfinished": search.unfinished,
        "first": search.ids[0] if search.ids else None,
        "last": search.ids[1] if search.ids else None,
        "since": chosen.since,
        "until": chosen.until,
        "after": after.id if after else None,
        "after_at": after.created_at if after else None,
        "scan": scan_max,
        "limit": PAGE + 1,
    }


def _end_of_walk(conn: Conn, values: dict[str, Any]) -> Place | None:
    """Find the last Job that a walk looked at, when there may be more behind it."""
    row = conn.execute(
        """
        SELECT count(*) AS walked, (array_agg(created_at ORDER BY created_at, id))[1] AS created_at,
            (array_agg(id ORDER BY created_at, id))[1] AS id
        FROM (
            SELECT created_at, id FROM jobs
            WHERE (%(by_account)s::uuid IS NULL OR account_id = %(by_account)s)
                AND (%(by_state)s::text IS NULL OR state = %(by_state)s)
                AND (%(by_model)s::text IS NULL OR model = %(by_model)s)
                AND (NOT %(by_unfinished)s OR finished_at IS NULL)
                AND (%(first)s::uuid IS NULL OR id BETWEEN %(first)s AND %(last)s)
                AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s)
                AND (%(until)s::timestamptz IS NULL OR created_at <= %(until)s)
                AND (%(after)s::uuid IS NULL OR (created_at, id) < (%(after_at)s, %(after)s))
            ORDER BY created_at DESC, id DESC LIMIT %(scan)s
        ) AS walk
        """,
        values,
    ).fetchone()
    assert row is not None
    return Place(row["created_at"], row["id"]) if row["walked"] >= values["scan"] else None
