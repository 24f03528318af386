"""The ledger against a model of two numbers an account, under any order of its verbs."""

from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg import errors as pg

from app.accounts.accounts import create_account
from app.errors import InsufficientTokensError
from app.kit.db import Conn, Database
from app.ledger.holds import (
    Charge,
    apply_resolution,
    grant_tokens,
    release_holds,
    settle_holds,
)
from app.ledger.invariants import LEDGER_INVARIANTS, find_violations
from tests.fixtures.builders import a_spec, insert_job
from tests.fixtures.cleaning import empty_database

# The requests themselves stay pending here: rules about their states are the Job machine's.
SUMS = [rule for rule in LEDGER_INVARIANTS if rule.name in {"L1", "L2", "L3", "L4", "L8", "L10"}]


class CrashError(Exception):
    """The process ends between two statements."""


class LedgerMachine(RuleBasedStateMachine):
    database: Database

    def __init__(self) -> None:
        super().__init__()
        self.balance: dict[UUID, int] = {}
        self.open: dict[tuple[UUID, UUID, int], int] = {}
        self.resolved: list[tuple[UUID, UUID, int]] = []

    @initialize()
    def two_accounts(self) -> None:
        empty_database(self.database)
        with self.database.transaction() as conn:
            for name in ("one", "two"):
                self.balance[create_account(conn, name)] = 0

    def held(self, account: UUID) -> int:
        return sum(amount for key, amount in self.open.items() if key[0] == account)

    @rule(data=st.data(), amount=st.integers(1, 100))
    def grant(self, data: st.DataObject, amount: int) -> None:
        account = data.draw(st.sampled_from(sorted(self.balance)))
        with self.database.transaction() as conn:
            grant_tokens(conn, account, amount, "a grant")
        self.balance[account] += amount

    @rule(data=st.data(), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4))
    def place(self, data: st.DataObject, sizes: list[int]) -> None:
        account = data.draw(st.sampled_from(sorted(self.balance)))
        specs = [a_spec(prompt_tokens=1, max_tokens=size) for size in sizes]
        needed = sum(sizes) + len(sizes)
        if needed > self.balance[account] - self.held(account):
            with pytest.raises(InsufficientTokensError), self.database.transaction() as conn:
                insert_job(conn, account, specs=specs)
            return
        with self.database.transaction() as conn:
            job = insert_job(conn, account, specs=specs)
        for index, spec in enumerate(specs):
            self.open[account, job.id, index] = spec.tokens_held

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.integers(1, 60), crash=st.booleans())
    def settle(self, data: st.DataObject, tokens: int, crash: bool) -> None:  # noqa: FBT001
        account, job, index = key = data.draw(st.sampled_from(sorted(self.open)))
        try:
            with self.database.transaction() as conn:
                resolution = settle_holds(conn, account, job, [Charge(index, tokens)])
                if crash:
                    raise CrashError
                apply_resolution(conn, account, resolution)
        except CrashError:
            return
        self.balance[account] -= min(tokens, self.open.pop(key))
        self.resolved.append(key)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release_a_job(self, data: st.DataObject) -> None:
        account, job, _ = data.draw(st.sampled_from(sorted(self.open)))
        keys = [key for key in self.open if key[1] == job]
        with self.database.transaction() as conn:
            resolution = release_holds(conn, account, job, [key[2] for key in keys])
            apply_resolution(conn, account, resolution)
        assert resolution.released == sum(self.open.pop(key) for key in keys)
        self.resolved += keys

    @precondition(lambda self: self.resolved)
    @rule(data=st.data(), settles=st.booleans())
    def resolve_again(self, data: st.DataObject, settles: bool) -> None:  # noqa: FBT001
        account, job, index = data.draw(st.sampled_from(self.resolved))

        def resolve(conn: Conn) -> None:
            if settles:
                again = settle_holds(conn, account, job, [Charge(index, 1)])
            else:
                again = release_holds(conn, account, job, [index])
            apply_resolution(conn, account, again)

        with pytest.raises(pg.UniqueViolation):
            self.database.run(resolve)

    @invariant()
    def the_ledger_is_what_the_model_says(self) -> None:
        with self.database.transaction() as conn:
            rows = conn.execute("SELECT id, balance, held FROM accounts").fetchall()
            assert find_violations(conn, SUMS) == []
        assert {row["id"]: (row["balance"], row["held"]) for row in rows} == {
            account: (balance, self.held(account)) for account, balance in self.balance.items()
        }


def test_the_ledger_keeps_its_sums_under_any_order_of_verbs(database) -> None:
    LedgerMachine.database = database
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
