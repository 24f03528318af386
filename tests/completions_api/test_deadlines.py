"""Rows of Completions: claimed once, ended once, whoever comes late."""

import pytest

from app.completions.records import (
    CLAIM_SECONDS,
    Failure,
    cancel_completion,
    claim_completion,
    end_overdue,
    fail_completion,
    read_ending,
    still_running,
    store_completion,
    succeed_completion,
)
from app.errors import InsufficientTokensError
from app.kit.ids import new_uuid
from app.reconcile.steps import end_completions
from tests.checker import check_everything
from tests.fixtures.builders import a_spec

HELD = 9  # of a_spec: 5 prompt tokens and 4 to generate
BALANCE = 1000


@pytest.fixture
def account(database, builders):
    """An account; everything is checked at the end."""
    yield builders.an_account(balance=BALANCE)
    check_everything(database)


@pytest.fixture
def stored(database, account):
    """A Completion that waits."""
    return store(database, account)


def store(database, account, *, seconds=60.0):
    completion_id = new_uuid()
    for _ in range(2):  # the second time a lost commit is repeated
        with database.transaction() as conn:
            store_completion(
                conn, account, completion_id, model="tiny", specs=[a_spec()], seconds=seconds
            )
    return completion_id


def run(database, work):
    with database.transaction() as conn:
        return work(conn)


def numbers(database, account):
    with database.transaction() as conn:
        row = conn.execute("SELECT balance, held FROM accounts WHERE id = %s", [account]).fetchone()
    return row["balance"], row["held"]


def claim(database, completion_id, worker):
    return run(
        database, lambda c: claim_completion(c, completion_id, worker.worker_id, model="tiny")
    )


def make_late(database, completion_id):
    with database.transaction() as conn:
        conn.execute(
            "UPDATE completions SET deadline = clock_timestamp() WHERE id = %s", [completion_id]
        )


def test_one_worker_of_two_gets_a_completion(database, builders, account, stored):
    first, second = builders.a_worker(), builders.a_worker()
    assert numbers(database, account) == (BALANCE, HELD)
    claimed = claim(database, stored, first)
    assert claimed is not None
    assert claimed.specs == (a_spec(),)
    assert claim(database, stored, second) is None
    assert claim(database, stored, first) == claimed, "a repeated commit finds its own effect"
    assert not run(database, lambda c: succeed_completion(c, stored, second.worker_id, 2))
    assert run(database, lambda c: succeed_completion(c, stored, first.worker_id, 2))
    assert run(database, lambda c: succeed_completion(c, stored, first.worker_id, 2))
    assert numbers(database, account) == (BALANCE - 7, 0)


def test_an_answer_after_the_deadline_is_not_charged(database, builders, account, stored):
    worker = builders.a_worker()
    claim(database, stored, worker)
    make_late(database, stored)
    assert not run(database, lambda c: succeed_completion(c, stored, worker.worker_id, 2))
    assert run(database, lambda c: still_running(c, worker.worker_id, [stored])) == set()
    assert end_completions(database) == 1
    assert end_completions(database) == 0
    ending = run(database, lambda c: read_ending(c, stored))
    assert (ending.state, ending.failure.code) == ("expired", "deadline_exceeded")
    assert not run(database, lambda c: succeed_completion(c, stored, worker.worker_id, 2))
    assert numbers(database, account) == (BALANCE, 0)


def test_what_nobody_takes_ends_after_seconds(database, account, stored):
    assert run(database, end_overdue) == 0
    with database.transaction() as conn:
        conn.execute(
            "UPDATE completions SET created_at = created_at - make_interval(secs => %s)",
            [CLAIM_SECONDS],
        )
    assert run(database, lambda c: end_overdue(c, completion_id=new_uuid())) == 0
    assert run(database, lambda c: end_overdue(c, completion_id=stored)) == 1
    assert run(database, lambda c: read_ending(c, stored)).failure.code == "not_taken"
    assert numbers(database, account) == (BALANCE, 0)


def test_a_late_completion_cannot_be_claimed(database, builders, stored):
    make_late(database, stored)
    assert claim(database, stored, builders.a_worker()) is None
    assert run(database, end_overdue) == 1


def test_a_client_that_left_pays_what_it_read_or_nothing(database, builders, account):
    worker = builders.a_worker()
    for generated, charged in ((None, 0), (3, 8)):
        before = numbers(database, account)[0]
        completion_id = store(database, account)
        claim(database, completion_id, worker)
        with database.transaction() as conn:
            assert cancel_completion(conn, completion_id, generated=generated)
            assert not cancel_completion(conn, completion_id)
            assert not succeed_completion(conn, completion_id, worker.worker_id, 1)
            assert not fail_completion(conn, completion_id, Failure("engine_error", "It failed."))
        assert numbers(database, account) == (before - charged, 0)


def test_what_costs_more_than_its_hold_is_clipped(database, builders, account, stored):
    worker = builders.a_worker()
    claim(database, stored, worker)
    assert run(database, lambda c: succeed_completion(c, stored, worker.worker_id, 100))
    assert numbers(database, account) == (BALANCE - HELD, 0)


def test_without_tokens_nothing_is_stored(database, builders):
    poor = builders.an_account(balance=HELD - 1)
    with pytest.raises(InsufficientTokensError):
        store(database, poor)
    with database.transaction() as conn:
        assert conn.execute("SELECT 1 FROM completions").fetchall() == []
    check_everything(database)


def test_the_reconciler_ends_more_than_one_transaction_takes(database, account):
    for _ in range(3):
        store(database, account, seconds=-1)
    assert run(database, lambda c: end_overdue(c, limit=2)) == 2
    assert end_completions(database) == 1
    assert numbers(database, account) == (BALANCE, 0)
