"""Runs of the invariants: each rule on one snapshot, its outcome, and the last run in the database.

The reconciler runs them every hour with much time, an operator at the dashboard with little. A rule
that takes too long is unfinished, which is not the same as true.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final, Literal

from psycopg import errors as pg
from psycopg.types.json import Jsonb

from app.jobs.invariants import INVARIANTS
from app.kit.db import Conn, Database, take_snapshot
from app.ledger.invariants import Invariant, Violation, find_violations

SHOWN_MAX: Final = 20  # violations of one rule that a run keeps; the log has up to a hundred
RUNS_KEPT: Final = 500
Outcome = Literal["true", "broken", "unfinished"]


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """How one rule came out."""

    name: str
    sentence: str
    outcome: Outcome
    seconds: float
    violations: list[Violation]


@dataclass(frozen=True, slots=True)
class AuditRun:
    """A run as it was noted; `rules` are the fields of RuleOutcome."""

    began_at: datetime
    finished_at: datetime
    run_by: str
    rules: list[dict[str, Any]]

    @property
    def broken(self) -> int:
        """Count the rules that were found broken."""
        return sum(rule["outcome"] == "broken" for rule in self.rules)

    @property
    def unfinished(self) -> int:
        """Count the rules that there was no time for."""
        return sum(rule["outcome"] == "unfinished" for rule in self.rules)


@contextmanager
def snapshot(database: Database, *, statement_seconds: float) -> Iterator[Conn]:
    """Give a read-only transaction that sees one instant; each statement may take so long."""
    with database.transaction() as conn:
        take_snapshot(conn)
        conn.execute(
            "SELECT set_config('statement_timeout', %s, true)",
            [f"{round(1000 * statement_seconds)}ms"],
        )
        yield conn


def claim_run(conn: Conn) -> bool:
    """Claim the one run on a button that there may be at a time, until the transaction ends."""
    row = conn.execute(
        "SELECT pg_try_advisory_xact_lock(hashtextextended('invariants', 0)) AS free"
    ).fetchone()
    assert row is not None
    return bool(row["free"])


def run_rules(
    conn: Conn, *, seconds_max: float | None = None, rules: Sequence[Invariant] = INVARIANTS
) -> list[RuleOutcome]:
    """Check every rule; after `seconds_max` those that are left are unfinished."""
    outcomes = []
    began = time.monotonic()
    for rule in rules:
        at = time.monotonic()
        outcome: Outcome = "unfinished"
        violations: list[Violation] = []
        if seconds_max is None or at - began < seconds_max:
            try:
                with conn.transaction():
                    violations = find_violations(conn, [rule])
                outcome = "broken" if violations else "true"
            except pg.QueryCanceled:
                violations = []
        seconds = round(time.monotonic() - at, 3)
        outcomes.append(RuleOutcome(rule.name, rule.sentence, outcome, seconds, violations))
    return outcomes


def note_run(
    conn: Conn, began_at: datetime, outcomes: Sequence[RuleOutcome], *, run_by: str
) -> None:
    """Keep a run; the oldest beyond RUNS_KEPT are forgotten."""
    rules = [
        {
            "name": outcome.name,
            "sentence": outcome.sentence,
            "outcome": outcome.outcome,
            "seconds": outcome.seconds,
            "violations": [asdict(item) for item in outcome.violations[:SHOWN_MAX]],
            "violations_found": len(outcome.violations),
        }
        for outcome in outcomes
    ]
    row = conn.execute(
        """
        INSERT INTO invariant_runs (began_at, run_by, rules) VALUES (%s, %s, %s) RETURNING id
        """,
        [began_at, run_by, Jsonb(rules)],
    ).fetchone()
    assert row is not None
    conn.execute("DELETE FROM invariant_runs WHERE id <= %s", [row["id"] - RUNS_KEPT])


def last_runs(conn: Conn, *, limit: int) -> list[AuditRun]:
    """Read the newest runs, newest first."""
    rows = conn.execute(
        """
        SELECT began_at, finished_at, run_by, rules FROM invariant_runs
        ORDER BY id DESC LIMIT %s
        """,
        [limit],
    ).fetchall()
    return [AuditRun(**row) for row in rows]


def started_at(conn: Conn) -> datetime:
    """Say when this transaction began, by the database's clock."""
    row = conn.execute("SELECT now() AS now").fetchone()
    assert row is not None
    now: datetime = row["now"]
    return now
