"""Placing, settling, releasing: the three verbs of the ledger, and what Postgres refuses."""

import threading

import psycopg
import pytest
from psycopg import errors as pg

from app.errors import InsufficientTokensError, UnavailableError
from app.kit.ids import new_uuid
from app.ledger.holds import (
    Charge,
    LedgerMismatchError,
    Resolution,
    apply_resolution,
    grant_tokens,
    place_holds,
    release_holds,
    settle_holds,
    stop_holds,
)
from app.ledger.invariants import LEDGER_INVARIANTS, find_violations
from app.ledger.usage import account_usage, open_holds
from tests.checker import check_everything
from tests.fixtures.builders import insert_job


def balance_of(database, account_id):
    with database.transaction() as conn:
        row = conn.execute(
            "SELECT balance, held FROM accounts WHERE id = %s", [account_id]
        ).fetchone()
    return row["balance"], row["held"]


def test_a_hold_reserves_and_changes_no_balance(database, builders) -> None:
    account = builders.an_account(balance=100)
    job = builders.a_job(account_id=account, requests=3, max_tokens=4)
    assert balance_of(database, account) == (100, 27)
    assert job.tokens_held == 27
    check_everything(database)


def test_a_job_that_costs_too_much_is_refused_whole(database, builders) -> None:
    account = builders.an_account(balance=26)
    with pytest.raises(InsufficientTokensError, match=r"27 tokens.*26 available"):
        builders.a_job(account_id=account, requests=3, max_tokens=4)
    with database.transaction() as conn:
        for table in ("jobs", "requests", "shards", "holds"):
            assert conn.execute(f"SELECT count(*) AS n FROM {table}").fetchone() == {"n": 0}
    assert balance_of(database, account) == (26, 0)


def test_a_hold_may_take_the_last_token(database, builders) -> None:
    account = builders.an_account(balance=27)
    builders.a_job(account_id=account, requests=3, max_tokens=4)
    assert balance_of(database, account) == (27, 27)


def test_settling_charges_what_was_used_and_gives_back_the_rest(database, builders) -> None:
    account = builders.an_account(balance=100)
    job = builders.a_job(account_id=account, requests=3, max_tokens=4)
    with database.transaction() as conn:
        settled = settle_holds(conn, account, job.id, [Charge(0, 6), Charge(1, 99)])
        released = release_holds(conn, account, job.id, [2])
        assert (settled, settled.released) == (Resolution(2, 18, 15), 3)
        assert released == Resolution(1, 9, 0)
        apply_resolution(conn, account, settled + released)
    assert balance_of(database, account) == (85, 0)
    with database.transaction() as conn:
        broken = {violation.invariant for violation in find_violations(conn, LEDGER_INVARIANTS)}
    assert broken.isdisjoint({"L1", "L2", "L3", "L4"}), "the requests did not end, but sums agree"


@pytest.mark.parametrize("verb", ["settle", "release"])
@pytest.mark.parametrize("first", ["settle", "release"])
def test_a_second_resolution_of_a_hold_is_refused_by_the_database(
    database, builders, first, verb
) -> None:
    job = builders.a_job(requests=1)

    def resolve(conn, how):
        if how == "settle":
            return settle_holds(conn, job.account_id, job.id, [Charge(0, 5)])
        return release_holds(conn, job.account_id, job.id, [0])

    with database.transaction() as conn:
        apply_resolution(conn, job.account_id, resolve(conn, first))
    before = balance_of(database, job.account_id)
    with pytest.raises(pg.UniqueViolation), database.transaction() as conn:
        apply_resolution(conn, job.account_id, resolve(conn, verb))
    assert balance_of(database, job.account_id) == before


def test_a_hold_that_does_not_exist_cannot_be_resolved(database, builders) -> None:
    job = builders.a_job(requests=1)
    for attempt in (
        lambda conn: settle_holds(conn, job.account_id, job.id, [Charge(1, 5)]),
        lambda conn: release_holds(conn, job.account_id, job.id, [0, 1]),
        lambda conn: release_holds(conn, new_uuid(), job.id, [0]),
    ):
        with pytest.raises(LedgerMismatchError), database.transaction() as conn:
            attempt(conn)


def test_one_request_has_one_hold(database, builders) -> None:
    job = builders.a_job(requests=1)
    with pytest.raises(pg.UniqueViolation), database.transaction() as conn:
        place_holds(conn, job.account_id, job.id, [(0, 5)])


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE entries SET amount = 0",
        "DELETE FROM entries",
        "TRUNCATE entries",
        "UPDATE holds SET amount = 1",
        "DELETE FROM holds",
        "TRUNCATE holds CASCADE",
    ],
)
def test_entries_and_holds_are_never_changed(database, builders, change) -> None:
    builders.a_job(requests=1)
    with (
        pytest.raises(psycopg.errors.RaiseException, match="never changed"),
        database.transaction() as conn,
    ):
        conn.execute(change)


@pytest.mark.parametrize(
    "change", ["held = -1", "held = balance + 1", "balance = held - 1", "balance = -1"]
)
def test_postgres_refuses_a_balance_below_what_is_held(database, builders, change) -> None:
    builders.a_job(requests=1)
    with pytest.raises(pg.CheckViolation), database.transaction() as conn:
        conn.execute(f"UPDATE accounts SET {change}")


@pytest.mark.parametrize("amount", [0, -5])
def test_a_grant_is_at_least_one_token(database, builders, amount) -> None:
    account = builders.an_account()
    with pytest.raises(ValueError, match="at least 1"), database.transaction() as conn:
        grant_tokens(conn, account, amount, "nothing")
    with pytest.raises(ValueError, match="no account"), database.transaction() as conn:
        grant_tokens(conn, new_uuid(), 5, "nobody")


def test_an_account_under_audit_places_no_holds_but_settles(database, builders) -> None:
    job = builders.a_job(requests=1)
    with database.transaction() as conn:
        assert stop_holds(conn, job.account_id, "L2: held 1, open Holds 2")
        assert not stop_holds(conn, job.account_id, "again")
    with pytest.raises(UnavailableError, match="audited"), database.transaction() as conn:
        insert_job(conn, job.account_id, requests=1)
    with database.transaction() as conn:
        settled = settle_holds(conn, job.account_id, job.id, [Charge(0, 5)])
        apply_resolution(conn, job.account_id, settled)
    assert balance_of(database, job.account_id) == (999_995, 0)


def test_usage_tells_where_the_tokens_are(database, builders) -> None:
    account = builders.an_account(balance=100)
    builders.a_job(account_id=account, requests=1, max_tokens=4)
    job = builders.a_job(account_id=account, requests=2, max_tokens=10)
    with database.transaction() as conn:
        usage = account_usage(conn, account)
        assert (usage.balance, usage.held, usage.available, usage.granted) == (100, 39, 61, 100)
        assert (usage.charged, usage.released) == (0, 0)
        holds = open_holds(conn, account, limit=1)
        assert [(row.job_id, row.holds, row.tokens_held) for row in holds] == [(job.id, 2, 30)]
        with pytest.raises(KeyError):
            account_usage(conn, new_uuid())


def test_of_180_racing_jobs_exactly_as_many_are_taken_as_there_are_tokens_for(
    database_url, database, builders
) -> None:
    account = builders.an_account(balance=100 * 9 + 8)
    start = threading.Barrier(18)
    taken, refused, failures = [], [], []

    def submit_ten() -> None:
        with psycopg.connect(database_url, row_factory=psycopg.rows.dict_row) as conn:
            start.wait()
            for _ in range(10):
                try:
                    with conn.transaction():
                        taken.append(insert_job(conn, account, requests=1, max_tokens=4))
                except InsufficientTokensError as error:
                    refused.append(error)
                except Exception as error:  # noqa: BLE001 (shown by the main thread)
                    failures.append(error)

    threads = [threading.Thread(target=submit_ten) for _ in range(18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (len(taken), len(refused)) == (100, 80)
    assert balance_of(database, account) == (908, 900)
    check_everything(database)
