"""What the pages of accounts show: one bounded read for each piece, by key, never by offset."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.kit.db import Conn
from app.ledger.usage import JobHolds, open_holds

PAGE: int = 50
SHOWN_MAX: int = 20
SCAN_MAX: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRow:
    """An account as the list shows it; tokens."""

    id: UUID
    name: str
    balance: int
    held: int
    created_at: datetime
    holds_stopped_at: datetime | None
    holds_stopped_reason: str | None

    @property
    def available(self) -> int:
        """Tokens that a new Hold can take."""
        return self.balance - self.held


@dataclass(frozen=True, slots=True)
class AccountPage:
    """A page of accounts; behind `next` the next one begins, None at the end.

    `looked_back_to` is set when the page ended because enough accounts were looked at.
    """

    rows: list[AccountRow]
    next: UUID | None
    looked_back_to: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRow:
    """An entry of the ledger, and what its Hold was for."""

    id: int
    kind: str
    amount: int
    clipped: int
    note: str | None
    created_at: datetime
    hold_id: int | None
    held: int | None
    job_id: UUID | None
    request_index: int | None
    completion_id: UUID | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionHold:
    """A Completion that has not ended, and what it holds."""

    id: UUID
    model: str
    state: str
    tokens_held: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountView:
    """Everything that the page of one account shows beside its keys."""

    account: AccountRow
    granted: int
    jobs: list[JobHolds]
    jobs_holding: int
    completions: list[CompletionHold]
    completions_holding: int
    entries: list[EntryRow]

    @property
    def charged(self) -> int:
        """Tokens charged so far: what was granted and is no longer there (invariant L3)."""
        return self.granted - self.account.balance


def list_accounts(
    conn: Conn,
    *,
    name: str | None = None,
    stopped: bool = False,
    after: UUID | None = None,
    scan_max: int = SCAN_MAX,
) -> AccountPage:
    """List accounts, newest first: those behind `after` that match, of the next `scan_max`."""
    values = {
        "after": after, "name": name, "stopped": stopped, "scan": scan_max, "limit": PAGE + 1,
    }  # fmt: skip
    rows = conn.execute(
        """
        SELECT id, name, balance, held, created_at, holds_stopped_at, holds_stopped_reason
        FROM (
            SELECT * FROM accounts WHERE (%(after)s::uuid IS NULL OR id < %(after)s)
            ORDER BY id DESC LIMIT %(scan)s
        ) AS walk
        WHERE (%(name)s::text IS NULL OR strpos(lower(name), lower(%(name)s)) > 0)
            AND (NOT %(stopped)s OR holds_stopped_at IS NOT NULL)
        ORDER BY id DESC LIMIT %(limit)s
        """,
        values,
    ).fetchall()
    found = [AccountRow(**row) for row in rows[:PAGE]]
    if len(rows) > PAGE:
        return AccountPage(found, found[-1].id)
    end = conn.execute(
        """
        SELECT count(*) AS walked, (array_agg(id ORDER BY id))[1] AS id,
            (array_agg(created_at ORDER BY id))[1] AS created_at
        FROM (
            SELECT id, created_at FROM accounts WHERE (%(after)s::uuid IS NULL OR id < %(after)s)
            ORDER BY id DESC LIMIT %(scan)s
        ) AS walk
        """,
        values,
    ).fetchone()
    assert end is not None
    if end["walked"] < scan_max:
        return AccountPage(found, None)
    return AccountPage(found, end["id"], end["created_at"])


def read_account(conn: Conn, account_id: UUID, *, lock: bool = False) -> AccountRow | None:
    """Read an account; `lock` keeps others from changing it until the transaction ends."""
    if lock:
        conn.execute("SELECT 1 FROM accounts WHERE id = %s FOR NO KEY UPDATE", [account_id])
    row = conn.execute(
        """
        SELECT id, name, balance, held, created_at, holds_stopped_at, holds_stopped_reason
        FROM accounts WHERE id = %s
        """,
        [account_id],
    ).fetchone()
    return None if row is None else AccountRow(**row)


def view_account(conn: Conn, account_id: UUID) -> AccountView | None:
    """Read what the page of one account shows; None when there is no such account."""
    account = read_account(conn, account_id)
    if account is None:
        return None
    sums = conn.execute(
        """
        SELECT coalesce(sum(CASE kind WHEN 'grant' THEN amount ELSE -amount END), 0)::bigint
                AS granted,
            (SELECT count(*) FROM jobs
                WHERE account_id = %(id)s AND finished_at IS NULL AND tokens_held > 0) AS jobs,
            (SELECT count(*) FROM completions
                WHERE account_id = %(id)s AND finished_at IS NULL) AS completions
        FROM entries WHERE account_id = %(id)s AND kind IN ('grant', 'reversal')
        """,
        {"id": account_id},
    ).fetchone()
    assert sums is not None
    completions = conn.execute(
        """
        SELECT id, model, state, tokens_held, created_at FROM completions
        WHERE account_id = %s AND finished_at IS NULL ORDER BY deadline LIMIT %s
        """,
        [account_id, SHOWN_MAX],
    ).fetchall()
    return AccountView(
        account=account,
        granted=sums["granted"],
        jobs=open_holds(conn, account_id, limit=SHOWN_MAX),
        jobs_holding=sums["jobs"],
        completions_holding=sums["completions"],
        completions=[CompletionHold(**row) for row in completions],
        entries=list_entries(conn, account_id, limit=SHOWN_MAX),
    )


def list_entries(
    conn: Conn,
    account_id: UUID,
    *,
    limit: int,
    before: int | None = None,
    grants_only: bool = False,
) -> list[EntryRow]:
    """List entries of an account, newest first, those before the entry `before`."""
    rows = conn.execute(
        """
        SELECT entries.id, kind, entries.amount, clipped, note, entries.created_at, hold_id,
            holds.amount AS held, job_id, request_index, completion_id
        FROM (
            SELECT * FROM entries
            WHERE account_id = %(account_id)s AND (%(before)s::bigint IS NULL OR id < %(before)s)
                AND (NOT %(grants_only)s OR kind IN ('grant', 'reversal'))
            ORDER BY id DESC LIMIT %(limit)s
        ) AS entries LEFT JOIN holds ON holds.id = hold_id
        ORDER BY entries.id DESC
        """,
        {"account_id": account_id, "before": before, "grants_only": grants_only, "limit": limit},
    ).fetchall()
    return [EntryRow(**row) for row in rows]
