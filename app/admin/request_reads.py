"""Requests of a Job for the dashboard: pages by index, and one with its attempt and its ledger.

A page looks at SCAN_MAX requests at most: those behind its key, errored ones by their own index.
Waiting and running ones are looked for where shards say that they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from app.jobs.requests import find_request
from app.jobs.states import RequestState
from app.kit.db import Conn

PAGE: Final = 50
SCAN_MAX: Final = 20_000
# States of requests that have not ended, and that of the shards which hold them.
IN_SHARDS: Final[Mapping[RequestState | None, str]] = {
    RequestState.pending: "pending",
    RequestState.running: "leased",
}


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Which requests of a Job are meant; None leaves a field open."""

    state: RequestState | None = None
    code: str | None = None
    custom_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """A request as lists show it; `state` is running while its shard is leased."""

    request_index: int
    custom_id: str | None
    state: str
    attempt: int | None
    prompt_tokens: int
    completion_tokens: int | None
    tokens_held: int | None
    error_code: str | None
    error_message: str | None
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class RequestPage:
    """A page of requests; `next` is the index behind which the next page begins.

    `looked_to` is set when the page ended because enough requests were looked at.
    """

    rows: Sequence[RequestRow]
    next: int | None
    looked_to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRow:
    """An entry of the ledger for a request's Hold, with the Hold."""

    hold_id: int
    version: int
    held: int
    placed_at: datetime
    entry_id: int | None
    kind: str | None
    amount: int | None
    resolved_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One request: what the API says of it, its shard's attempt and worker, its ledger."""

    request: dict[str, Any]
    finished_at: datetime | None
    shard: dict[str, Any] | None
    holds: Sequence[EntryRow]


def list_page(
    conn: Conn, job_id: UUID, chosen: RequestFilter, *, total: int, after: int = -1
) -> RequestPage:
    """List requests that match, in index order, behind `after`; the Job has `total` requests."""
    if chosen.custom_id is not None:
        rows = _rows(conn, job_id, _named(conn, job_id, chosen.custom_id))
        return RequestPage([row for row in rows if _matches(row, chosen)], None)
    if chosen.code is not None or chosen.state is RequestState.errored:
        if chosen.state not in (None, RequestState.errored):
            return RequestPage([], None)  # only what was errored has a code
        return _errored_page(conn, job_id, chosen.code, after)
    start, last = after, total - 1
    if chosen.state in IN_SHARDS:
        span = _span(conn, job_id, IN_SHARDS[chosen.state], after)
        if span is None:
            return RequestPage([], None)
        start, last = max(after, span[0] - 1), span[1] - 1
    end = min(start + SCAN_MAX, last)
    indices = _indices(conn, job_id, chosen.state, start, end)
    rows = _rows(conn, job_id, indices[:PAGE])
    if len(indices) > PAGE:
        return RequestPage(rows, indices[PAGE - 1])
    return RequestPage(rows, end, end + 1) if end < last else RequestPage(rows, None)


def view_request(conn: Conn, job_id: UUID, index: int) -> RequestView | None:
    """Read one request of a Job; None when it has none of this index."""
    request = find_request(conn, job_id, index)
    if request is None:
        return None
    finished = conn.execute(
        "SELECT finished_at FROM requests WHERE job_id = %s AND request_index = %s",
        [job_id, index],
    ).fetchone()
    shard = conn.execute(
        """
        SELECT id, first_index, end_index, state, attempt, engine_deaths, worker_id, leased_at,
            lease_expires_at, finished_at
        FROM shards WHERE job_id = %s AND first_index <= %s ORDER BY first_index DESC LIMIT 1
        """,
        [job_id, index],
    ).fetchone()
    holds = conn.execute(
        """
        SELECT holds.id AS hold_id, version, holds.amount AS held, holds.created_at AS placed_at,
            entries.id AS entry_id, kind, entries.amount, entries.created_at AS resolved_at
        FROM holds LEFT JOIN entries ON entries.hold_id = holds.id
        WHERE holds.job_id = %s AND request_index = %s ORDER BY version DESC LIMIT 20
        """,
        [job_id, index],
    ).fetchall()
    return RequestView(
        request=request,
        finished_at=finished["finished_at"] if finished else None,
        shard=shard if shard is not None and index < shard["end_index"] else None,
        holds=[EntryRow(**row) for row in holds],
    )


def _matches(row: RequestRow, chosen: RequestFilter) -> bool:
    return chosen.state in (None, row.state) and chosen.code in (None, row.error_code)


def _named(conn: Conn, job_id: UUID, custom_id: str) -> list[int]:
    rows = conn.execute(
        "SELECT request_index FROM requests WHERE job_id = %s AND custom_id = %s",
        [job_id, custom_id],
    )
    return [row["request_index"] for row in rows]


def _errored_page(conn: Conn, job_id: UUID, code: str | None, after: int) -> RequestPage:
    """List errored requests; the partial index leads from one to the next."""
    walked = conn.execute(
        """
        SELECT request_index, error_code FROM requests
        WHERE job_id = %s AND error_code IS NOT NULL AND request_index > %s
        ORDER BY request_index LIMIT %s
        """,
        [job_id, after, SCAN_MAX],
    ).fetchall()
    indices = [row["request_index"] for row in walked if code in (None, row["error_code"])]
    rows = _rows(conn, job_id, indices[:PAGE])
    if len(indices) > PAGE:
        return RequestPage(rows, indices[PAGE - 1])
    if len(walked) < SCAN_MAX:
        return RequestPage(rows, None)
    last = walked[-1]["request_index"]
    return RequestPage(rows, last, last + 1)


def _span(conn: Conn, job_id: UUID, state: str, after: int) -> tuple[int, int] | None:
    """Find where shards of this state begin and end that reach beyond `after`; None: none does."""
    row = conn.execute(
        """
        SELECT min(first_index) AS first_index, max(end_index) AS end_index
        FROM shards WHERE job_id = %s AND state = %s AND end_index > %s
        """,
        [job_id, state, after + 1],
    ).fetchone()
    assert row is not None
    return None if row["end_index"] is None else (row["first_index"], row["end_index"])


def _indices(
    conn: Conn, job_id: UUID, state: RequestState | None, start: int, end: int
) -> list[int]:
    """Find the first indices in (start, end] of this state, one more than a page holds."""
    if state in IN_SHARDS:
        # The limit keeps the shards first: joined freely, a new Job without statistics had every
        # shard searched for each of its requests.
        rows = conn.execute(
            """
            SELECT request_index FROM shards, LATERAL (
                SELECT request_index FROM requests
                WHERE requests.job_id = %(job)s AND requests.state = 'pending'
                    AND request_index >= first_index AND request_index < end_index
                    AND request_index > %(start)s AND request_index <= %(end)s
                ORDER BY request_index LIMIT %(limit)s
            ) AS theirs
            WHERE shards.job_id = %(job)s AND shards.state = %(shard)s
                AND end_index > %(start)s AND first_index <= %(end)s
            ORDER BY first_index, request_index LIMIT %(limit)s
            """,
            {
                "job": job_id,
                "shard": IN_SHARDS[state],
                "start": start,
                "end": end,
                "limit": PAGE + 1,
            },
        )
    else:
        rows = conn.execute(
            """
            SELECT request_index FROM requests
            WHERE job_id = %(job)s AND request_index > %(start)s AND request_index <= %(end)s
                AND (%(state)s::text IS NULL OR state = %(state)s)
            ORDER BY request_index LIMIT %(limit)s
            """,
            {"job": job_id, "state": state, "start": start, "end": end, "limit": PAGE + 1},
        )
    return [row["request_index"] for row in rows]


def _rows(conn: Conn, job_id: UUID, indices: Sequence[int]) -> list[RequestRow]:
    """Read these requests with their Holds; the shard says which of them run."""
    rows = conn.execute(
        """
        SELECT r.request_index, r.custom_id, r.attempt, r.prompt_tokens, r.completion_tokens,
            holds.amount AS tokens_held, r.error_code, r.error_message, r.finished_at,
            CASE WHEN r.state = 'pending' AND (
                SELECT s.state = 'leased' AND r.request_index < s.end_index FROM shards s
                WHERE s.job_id = r.job_id AND s.first_index <= r.request_index
                ORDER BY s.first_index DESC LIMIT 1
            ) THEN 'running' ELSE r.state END AS state
        FROM requests r LEFT JOIN holds ON holds.job_id = r.job_id
            AND holds.request_index = r.request_index AND holds.version = r.version
        WHERE r.job_id = %s AND r.request_index = ANY(%s) ORDER BY r.request_index
        """,
        [job_id, list(indices)],
    )
    return [RequestRow(**row) for row in rows]
