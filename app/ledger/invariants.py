"""What must always be true of the ledger, as SQL that returns one row for each violation.

Tests run these after every step, the reconciler every hour. Each query gives `subject` (an id)
and `detail`. Invariants of Jobs, shards and parts are in app/jobs/invariants.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString

from app.kit.db import Conn

ROWS_MAX = 100  # a broken rule usually breaks in many rows; the first ones tell why


@dataclass(frozen=True, slots=True)
class Invariant:
    """One rule: its name, the sentence that is true, and the query for rows where it is not."""

    name: str
    sentence: str
    query: LiteralString


@dataclass(frozen=True, slots=True)
class Violation:
    """One row that breaks a rule."""

    invariant: str
    sentence: str
    subject: str
    detail: str


def find_violations(conn: Conn, invariants: Sequence[Invariant]) -> list[Violation]:
    """Run each query; list at most ROWS_MAX violations of each rule."""
    return [
        Violation(rule.name, rule.sentence, row["subject"], row["detail"])
        for rule in invariants
        for row in conn.execute(rule.query).fetchmany(ROWS_MAX)
    ]


LEDGER_INVARIANTS = (
    Invariant(
        "L1",
        "0 <= held <= balance for every account",
        """
        SELECT id::text AS subject, format('balance %s, held %s', balance, held) AS detail
        FROM accounts WHERE NOT (0 <= held AND held <= balance)
        """,
    ),
    Invariant(
        "L2",
        "an account's held is the sum of its open Holds",
        """
        SELECT accounts.id::text AS subject,
            format('held %s, open Holds %s', accounts.held, coalesce(open.amount, 0)) AS detail
        FROM accounts LEFT JOIN (
            SELECT account_id, sum(amount) AS amount FROM holds
            WHERE NOT EXISTS (SELECT 1 FROM entries WHERE entries.hold_id = holds.id)
            GROUP BY account_id
        ) AS open ON open.account_id = accounts.id
        WHERE accounts.held <> coalesce(open.amount, 0)
        """,
    ),
    Invariant(
        "L3",
        "an account's balance is its grants less reversals and charges",
        """
        SELECT accounts.id::text AS subject,
            format('balance %s, entries %s', accounts.balance, coalesce(moved.amount, 0)) AS detail
        FROM accounts LEFT JOIN (
            SELECT account_id, sum(CASE kind WHEN 'grant' THEN amount
                WHEN 'release' THEN 0 ELSE -amount END) AS amount
            FROM entries GROUP BY account_id
        ) AS moved ON moved.account_id = accounts.id
        WHERE accounts.balance <> coalesce(moved.amount, 0)
        """,
    ),
    Invariant(
        "L4",
        "all balances and all charges together are what was granted",
        """
        SELECT 'all accounts' AS subject,
            format('balances %s, charged %s, granted %s', balances, charged, granted) AS detail
        FROM (SELECT
            (SELECT coalesce(sum(balance), 0) FROM accounts) AS balances,
            (SELECT coalesce(sum(amount), 0) FROM entries WHERE kind = 'settle') AS charged,
            (SELECT coalesce(sum(CASE kind WHEN 'grant' THEN amount ELSE -amount END), 0)
                FROM entries WHERE kind IN ('grant', 'reversal')) AS granted
        ) AS sums
        WHERE balances + charged <> granted
        """,
    ),
    Invariant(
        "L5",
        "every request has one Hold per version; terminal ones are resolved, pending ones open",
        """
        SELECT format('%s/%s', requests.job_id, requests.request_index) AS subject,
            format('%s, Hold %s, resolved by %s', requests.state, coalesce(holds.id::text, '-'),
                coalesce(entries.kind, 'nothing')) AS detail
        FROM requests
        LEFT JOIN holds ON holds.job_id = requests.job_id
            AND holds.request_index = requests.request_index AND holds.version = requests.version
        LEFT JOIN entries ON entries.hold_id = holds.id
        WHERE holds.id IS NULL OR (requests.state = 'pending') <> (entries.id IS NULL)
        """,
    ),
    Invariant(
        "L5-owner",
        "a Hold belongs to a request, its entry and its Job to the same account",
        """
        SELECT holds.id::text AS subject,
            format('Hold of %s/%s version %s', holds.job_id, holds.request_index, holds.version)
                AS detail
        FROM holds
        LEFT JOIN jobs ON jobs.id = holds.job_id
        LEFT JOIN requests ON requests.job_id = holds.job_id
            AND requests.request_index = holds.request_index
        LEFT JOIN entries ON entries.hold_id = holds.id
        WHERE holds.completion_id IS NULL AND (
            requests.job_id IS NULL OR jobs.account_id IS DISTINCT FROM holds.account_id
            OR (entries.id IS NOT NULL AND entries.account_id <> holds.account_id)
            OR holds.version > requests.version
            OR (holds.version < requests.version AND entries.id IS NULL))
        """,
    ),
    Invariant(
        "L6",
        "a charge is prompt + completion tokens, clipped to the Hold",
        """
        SELECT entries.id::text AS subject,
            format('charged %s, clipped %s, Hold %s, tokens %s + %s', entries.amount,
                entries.clipped, holds.amount, requests.prompt_tokens, requests.completion_tokens)
                AS detail
        FROM entries JOIN holds ON holds.id = entries.hold_id
        JOIN requests ON requests.job_id = holds.job_id
            AND requests.request_index = holds.request_index AND requests.version = holds.version
        WHERE entries.kind = 'settle' AND (entries.amount > holds.amount
            OR entries.amount + entries.clipped
                IS DISTINCT FROM requests.prompt_tokens + requests.completion_tokens
            OR (entries.clipped > 0 AND entries.amount < holds.amount))
        """,
    ),
    Invariant(
        "L7",
        "succeeded is settled; errored, cancelled and expired are released in full",
        """
        SELECT format('%s/%s', requests.job_id, requests.request_index) AS subject,
            format('%s, but %s of %s', requests.state, entries.kind, entries.amount) AS detail
        FROM requests JOIN holds ON holds.job_id = requests.job_id
            AND holds.request_index = requests.request_index AND holds.version = requests.version
        JOIN entries ON entries.hold_id = holds.id
        WHERE (requests.state = 'succeeded') <> (entries.kind = 'settle')
            OR (entries.kind = 'release' AND entries.amount <> holds.amount)
        """,
    ),
    Invariant(
        "L8",
        "triggers refuse every change of entries and Holds",
        """
        SELECT name AS subject, 'trigger is missing or off' AS detail
        FROM (VALUES ('entries_are_final'), ('holds_are_final')) AS expected (name)
        WHERE NOT EXISTS (SELECT 1 FROM pg_trigger WHERE tgname = name AND tgenabled = 'O')
        """,
    ),
    Invariant(
        "L9",
        "a finished Job has no open Hold",
        """
        SELECT holds.id::text AS subject, format('Job %s is %s', jobs.id, jobs.state) AS detail
        FROM holds JOIN jobs ON jobs.id = holds.job_id
        WHERE jobs.finished_at IS NOT NULL
            AND NOT EXISTS (SELECT 1 FROM entries WHERE entries.hold_id = holds.id)
        """,
    ),
    Invariant(
        "L10",
        "tokens are whole numbers everywhere in the ledger",
        """
        SELECT format('%s.%s', table_name, column_name) AS subject, data_type AS detail
        FROM information_schema.columns
        WHERE table_schema = 'public' AND table_name IN ('accounts', 'holds', 'entries')
            AND data_type IN ('real', 'double precision', 'numeric', 'money')
        """,
    ),
    Invariant(
        "L11",
        "a Completion has one Hold of its account: open until it ends, then resolved as it ended",
        """
        SELECT completions.id::text AS subject,
            format('%s, Hold %s of %s, resolved by %s', state, holds.id, holds.amount,
                coalesce(entries.kind, 'nothing')) AS detail
        FROM completions
        LEFT JOIN holds ON holds.completion_id = completions.id
        LEFT JOIN entries ON entries.hold_id = holds.id
        WHERE holds.id IS NULL OR holds.account_id <> completions.account_id
            OR holds.amount <> tokens_held
            OR (entries.id IS NOT NULL AND entries.account_id <> completions.account_id)
            OR entries.kind IS DISTINCT FROM CASE WHEN finished_at IS NULL THEN NULL
                WHEN completion_tokens IS NULL THEN 'release' ELSE 'settle' END
        """,
    ),
    Invariant(
        "L12",
        "a Completion is charged prompt + completion tokens, clipped to its Hold",
        """
        SELECT completions.id::text AS subject,
            format('charged %s, row says %s, clipped %s, Hold %s, tokens %s + %s', entries.amount,
                tokens_charged, clipped, holds.amount, prompt_tokens, completion_tokens) AS detail
        FROM completions
        JOIN holds ON holds.completion_id = completions.id
        JOIN entries ON entries.hold_id = holds.id
        WHERE (entries.kind = 'release'
                AND (entries.amount <> holds.amount OR tokens_charged IS DISTINCT FROM 0))
            OR (entries.kind = 'settle' AND (entries.amount IS DISTINCT FROM tokens_charged
                OR entries.amount + clipped IS DISTINCT FROM prompt_tokens + completion_tokens
                OR (clipped > 0 AND entries.amount <> holds.amount)))
        """,
    ),
)
