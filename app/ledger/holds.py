"""The only writer of balances, Holds and entries.

    place    account.held += amount              a hold row
    settle   account.held -= amount, balance -= charged    a `settle` entry naming the Hold
    release  account.held -= amount              a `release` entry naming the Hold
    grant    account.balance += amount           a `grant` entry
    reverse  account.balance -= amount           a `reversal` entry; only what is available

Rows are added, never changed; a second resolution of a Hold is refused by uq_entries_hold, and
ck_accounts_held_within_balance keeps 0 <= held <= balance. Settling and releasing write entries
first; `apply_resolution` moves the balance as the last statement of the transaction, so the one
hot row of an account is locked for the shortest time and always after everything else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

from app.errors import InsufficientTokensError, UnavailableError
from app.kit.db import Conn

GRANT_MAX = 10**15  # tokens; a hundred of these still fit into the ledger's 64 bits


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request cost: `tokens` = P + the sum of G; at most its Hold is charged."""

    request_index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Resolution:
    """The sum of resolved Holds, in tokens: `held` = charged + released."""

    holds: int = 0
    held: int = 0
    charged: int = 0

    @property
    def released(self) -> int:
        """Tokens that went back to the account."""
        return self.held - self.charged

    def __add__(self, other: "Resolution") -> "Resolution":
        """Add two sums."""
        return Resolution(
            self.holds + other.holds, self.held + other.held, self.charged + other.charged
        )


class LedgerMismatchError(Exception):
    """Holds and what they were placed for do not agree; the transaction must not commit."""


def place_holds(
    conn: Conn,
    account_id: UUID,
    job_id: UUID,
    rows: Iterable[tuple[int, int]],
    *,
    version: int = 1,
) -> int:
    """Reserve tokens for requests of a Job, all or none; return the sum.

    `rows` are (request_index, amount). Adds the sum to jobs.tokens_held (insert the Job with 0).
    Call it last in the transaction. Raises InsufficientTokensError, or UnavailableError while an
    audit of the account is open; the caller's transaction then rolls back.
    """
    needed = 0
    with (
        conn.cursor() as cursor,
        cursor.copy(
            "COPY holds (account_id, job_id, request_index, version, amount) FROM STDIN"
        ) as copy,
    ):
        for request_index, amount in rows:
            needed += amount
            copy.write_row((account_id, job_id, request_index, version, amount))
    conn.execute(
        "UPDATE jobs SET tokens_held = tokens_held + %s WHERE id = %s AND account_id = %s",
        [needed, job_id, account_id],
    )
    _reserve(conn, account_id, needed)
    return needed


def place_completion_hold(conn: Conn, account_id: UUID, completion_id: UUID, amount: int) -> None:
    """Reserve tokens for one Completion; the last statement of the transaction.

    Raises InsufficientTokensError or UnavailableError, as `place_holds` does.
    """
    conn.execute(
        """
        INSERT INTO holds (account_id, completion_id, version, amount) VALUES (%s, %s, 1, %s)
        """,
        [account_id, completion_id, amount],
    )
    _reserve(conn, account_id, amount)


def resolve_completion_hold(conn: Conn, completion_id: UUID, tokens: int | None) -> None:
    """Charge a Completion `tokens` = P + the sum of G, or release it in full when None.

    The last statement of the transaction. Raises LedgerMismatchError when it has no Hold,
    UniqueViolation when that was resolved before.
    """
    row = conn.execute(
        """
        WITH written AS (
            INSERT INTO entries (account_id, kind, amount, hold_id, clipped)
            SELECT account_id,
                CASE WHEN %(tokens)s::bigint IS NULL THEN 'release' ELSE 'settle' END,
                least(%(tokens)s::bigint, amount), id,
                greatest(coalesce(%(tokens)s::bigint, 0) - amount, 0)
            FROM holds WHERE completion_id = %(completion_id)s
        )
        SELECT account_id, amount AS held,
            CASE WHEN %(tokens)s::bigint IS NULL THEN 0
                ELSE least(%(tokens)s::bigint, amount) END AS charged
        FROM holds WHERE completion_id = %(completion_id)s
        """,
        {"tokens": tokens, "completion_id": completion_id},
    ).fetchone()
    if row is None:
        msg = f"Completion {completion_id} ended, but it has no Hold"
        raise LedgerMismatchError(msg)
    apply_resolution(conn, row["account_id"], Resolution(1, row["held"], row["charged"]))


def settle_holds(
    conn: Conn, account_id: UUID, job_id: UUID, charges: Sequence[Charge]
) -> Resolution:
    """Charge the open Holds of requests that succeeded; give back what they did not use.

    What a request cost beyond its Hold is not charged but counted in entries.clipped. Raises
    LedgerMismatchError when a Hold is missing, UniqueViolation when one was resolved before.
    """
    if not charges:
        return Resolution()
    # LATERAL with LIMIT keeps the planner at one index look-up a request. A plain join of a table
    # that was just filled, without statistics yet, read the whole Job for each shard (500 ms).
    row = conn.execute(
        """
        WITH due AS (
            SELECT holds.id, holds.amount, cost.tokens
            FROM unnest(%(indices)s::integer[], %(tokens)s::bigint[])
                AS cost (request_index, tokens),
            LATERAL (
                SELECT holds.id, holds.amount FROM requests JOIN holds USING (job_id, request_index)
                WHERE job_id = %(job_id)s AND request_index = cost.request_index
                    AND holds.version = requests.version AND holds.account_id = %(account_id)s
                LIMIT 1
            ) AS holds
        ), written AS (
            INSERT INTO entries (account_id, kind, amount, hold_id, clipped)
            SELECT %(account_id)s, 'settle', least(tokens, amount), id,
                greatest(tokens - amount, 0)
            FROM due
        )
        SELECT count(*) AS holds, coalesce(sum(amount), 0)::bigint AS held,
            coalesce(sum(least(tokens, amount)), 0)::bigint AS charged
        FROM due
        """,
        {
            "account_id": account_id,
            "job_id": job_id,
            "indices": [charge.request_index for charge in charges],
            "tokens": [charge.tokens for charge in charges],
        },
    ).fetchone()
    return _checked(row, len(charges), job_id)


def release_holds(
    conn: Conn, account_id: UUID, job_id: UUID, request_indices: Sequence[int]
) -> Resolution:
    """Give back the open Holds of requests that were not served, in full.

    Raises LedgerMismatchError when a Hold is missing, UniqueViolation when one was resolved
    before.
    """
    if not request_indices:
        return Resolution()
    row = conn.execute(
        """
        WITH due AS (
            SELECT holds.id, holds.amount
            FROM unnest(%(indices)s::integer[]) AS ended (request_index),
            LATERAL (
                SELECT holds.id, holds.amount FROM requests JOIN holds USING (job_id, request_index)
                WHERE job_id = %(job_id)s AND request_index = ended.request_index
                    AND holds.version = requests.version AND holds.account_id = %(account_id)s
                LIMIT 1
            ) AS holds
        ), written AS (
            INSERT INTO entries (account_id, kind, amount, hold_id)
            SELECT %(account_id)s, 'release', amount, id FROM due
        )
        SELECT count(*) AS holds, coalesce(sum(amount), 0)::bigint AS held, 0 AS charged FROM due
        """,
        {"account_id": account_id, "job_id": job_id, "indices": list(request_indices)},
    ).fetchone()
    return _checked(row, len(request_indices), job_id)


def apply_resolution(conn: Conn, account_id: UUID, resolution: Resolution) -> None:
    """Move the balance by what was settled and released; the last statement of a transaction."""
    if resolution.holds == 0:
        return
    conn.execute(
        "UPDATE accounts SET held = held - %s, balance = balance - %s WHERE id = %s",
        [resolution.held, resolution.charged, account_id],
    )


def grant_tokens(conn: Conn, account_id: UUID, amount: int, note: str) -> None:
    """Add tokens to an account. Raises ValueError for less than one token or no such account."""
    if amount < 1:
        msg = f"a grant must be at least 1 token, not {amount}"
        raise ValueError(msg)
    granted = conn.execute(
        "UPDATE accounts SET balance = balance + %s WHERE id = %s", [amount, account_id]
    )
    if granted.rowcount == 0:
        msg = f"no account {account_id}"
        raise ValueError(msg)
    conn.execute(
        "INSERT INTO entries (account_id, kind, amount, note) VALUES (%s, 'grant', %s, %s)",
        [account_id, amount, note],
    )


def reverse_tokens(conn: Conn, account_id: UUID, amount: int, note: str) -> None:
    """Take granted tokens back; what open Holds reserve stays.

    Raises ValueError for less than one token, and when fewer are available.
    """
    if amount < 1:
        msg = f"a reversal must be of at least 1 token, not {amount}"
        raise ValueError(msg)
    taken = conn.execute(
        """
        UPDATE accounts SET balance = balance - %(amount)s
        WHERE id = %(account_id)s AND balance - held >= %(amount)s
        """,
        {"amount": amount, "account_id": account_id},
    )
    if taken.rowcount == 0:
        msg = f"account {account_id} has fewer than {amount} tokens available"
        raise ValueError(msg)
    conn.execute(
        "INSERT INTO entries (account_id, kind, amount, note) VALUES (%s, 'reversal', %s, %s)",
        [account_id, amount, note],
    )


def allow_holds(conn: Conn, account_id: UUID) -> bool:
    """Let an account place Holds again; False when nothing kept it from that."""
    allowed = conn.execute(
        """
        UPDATE accounts SET holds_stopped_at = NULL, holds_stopped_reason = NULL
        WHERE id = %s AND holds_stopped_at IS NOT NULL
        """,
        [account_id],
    )
    return allowed.rowcount == 1


def stop_holds(conn: Conn, account_id: UUID, reason: str) -> bool:
    """Refuse new Holds of an account whose ledger does not add up; False when it was done."""
    stopped = conn.execute(
        """
        UPDATE accounts SET holds_stopped_at = now(), holds_stopped_reason = %s
        WHERE id = %s AND holds_stopped_at IS NULL
        """,
        [reason, account_id],
    )
    return stopped.rowcount == 1


def _reserve(conn: Conn, account_id: UUID, needed: int) -> None:
    """Take tokens out of what the account has available; raise when it has too few."""
    placed = conn.execute(
        """
        UPDATE accounts SET held = held + %(needed)s
        WHERE id = %(account_id)s AND balance - held >= %(needed)s AND holds_stopped_at IS NULL
        """,
        {"needed": needed, "account_id": account_id},
    )
    if placed.rowcount == 0:
        raise _why_refused(conn, account_id, needed)


def _checked(row: dict[str, int] | None, expected: int, job_id: UUID) -> Resolution:
    assert row is not None
    if row["holds"] != expected:
        msg = f"Job {job_id}: {expected} requests ended, but {row['holds']} Holds were found"
        raise LedgerMismatchError(msg)
    return Resolution(row["holds"], row["held"], row["charged"])


def _why_refused(conn: Conn, account_id: UUID, needed: int) -> Exception:
    row = conn.execute(
        "SELECT balance - held AS available, holds_stopped_at FROM accounts WHERE id = %s",
        [account_id],
    ).fetchone()
    if row is None:
        return LedgerMismatchError(f"no account {account_id}")
    if row["holds_stopped_at"] is not None:
        return UnavailableError(
            "This account takes no new work while its ledger is audited; try again later.",
            code="account_under_audit",
            retry_after=300,
        )
    available = row["available"]
    return InsufficientTokensError(
        f"This needs a Hold of {needed} tokens (prompt tokens + n x max_tokens of every request), "
        f"but the account has {available} available. Lower max_tokens, send fewer requests, wait "
        "for running Jobs to finish, or ask for more tokens.",
    )
