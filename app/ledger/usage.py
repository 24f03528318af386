"""The read side of the ledger: what an account has, holds, was charged and got back.

Sums come from the counters of Jobs and Completions, not from millions of entries; the invariants
prove that both agree.
"""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.kit.db import Conn


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountUsage:
    """Tokens of one account. granted - charged = balance = available + held."""

    balance: int
    held: int
    granted: int
    charged: int
    released: int

    @property
    def available(self) -> int:
        """Tokens that a new Hold can take."""
        return self.balance - self.held


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHolds:
    """What the open Holds of one Job reserve."""

    job_id: UUID
    holds: int
    tokens_held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionHold:
    """What the open Hold of one Completion reserves."""

    completion_id: UUID
    model: str
    state: str
    tokens_held: int
    created_at: datetime


def account_usage(conn: Conn, account_id: UUID) -> AccountUsage:
    """Sum up an account. Raises KeyError when it does not exist."""
    row = conn.execute(
        """
        SELECT balance, held,
            (SELECT coalesce(sum(CASE kind WHEN 'grant' THEN amount ELSE -amount END), 0)::bigint
                FROM entries
                WHERE account_id = accounts.id AND kind IN ('grant', 'reversal')) AS granted,
            jobs_charged + completions_charged AS charged,
            jobs_released + completions_released AS released
        FROM accounts, LATERAL (
            SELECT coalesce(sum(tokens_charged), 0)::bigint AS jobs_charged,
                coalesce(sum(tokens_released), 0)::bigint AS jobs_released
            FROM jobs WHERE account_id = accounts.id
        ) AS of_jobs, LATERAL (
            SELECT coalesce(sum(tokens_charged), 0)::bigint AS completions_charged,
                coalesce(sum(tokens_held - tokens_charged), 0)::bigint AS completions_released
            FROM completions WHERE account_id = accounts.id
        ) AS of_completions
        WHERE id = %s
        """,
        [account_id],
    ).fetchone()
    if row is None:
        raise KeyError(account_id)
    return AccountUsage(**row)


def open_holds(conn: Conn, account_id: UUID, *, limit: int) -> list[JobHolds]:
    """List the Jobs of an account that hold tokens, newest first, at most `limit`.

    A Job that is over holds nothing (an invariant), and there is an index of those that are not.
    """
    rows = conn.execute(
        """
        SELECT id AS job_id, tokens_held,
            n_total - n_succeeded - n_errored - n_cancelled - n_expired AS holds
        FROM jobs WHERE account_id = %s AND finished_at IS NULL AND tokens_held > 0
        ORDER BY created_at DESC, id DESC LIMIT %s
        """,
        [account_id, limit],
    ).fetchall()
    return [JobHolds(**row) for row in rows]


def open_completion_holds(conn: Conn, account_id: UUID, *, limit: int) -> list[CompletionHold]:
    """List the Completions of an account that hold tokens, newest first, at most `limit`."""
    rows = conn.execute(
        """
        SELECT id AS completion_id, model, state, tokens_held, created_at FROM completions
        WHERE account_id = %s AND finished_at IS NULL ORDER BY id DESC LIMIT %s
        """,
        [account_id, limit],
    ).fetchall()
    return [CompletionHold(**row) for row in rows]
