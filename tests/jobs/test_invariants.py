"""Each invariant sees what it is there to see: one broken row, one violation."""

import pytest

from app.completions.records import claim_completion, store_completion, succeed_completion
from app.jobs.claims import finish_shard
from app.jobs.invariants import INVARIANTS, check_invariants
from app.jobs.lifecycle import begin_finalizing, complete_job, expire_job
from app.kit.ids import new_uuid
from tests.checker import illegal_moves
from tests.fixtures.builders import a_spec, errored, succeeded
from tests.fixtures.parts import named_part

DROP = "ALTER TABLE %s DROP CONSTRAINT %s; "
UNGUARD = (
    "ALTER TABLE entries DISABLE TRIGGER entries_are_final; "
    "ALTER TABLE holds DISABLE TRIGGER holds_are_final; "
)
GUARD = (
    "; ALTER TABLE entries ENABLE TRIGGER entries_are_final; "
    "ALTER TABLE holds ENABLE TRIGGER holds_are_final"
)
BREAKS = {
    "L1": DROP % ("accounts", "ck_accounts_held_within_balance")
    + "UPDATE accounts SET held = balance + 1",
    "L2": "UPDATE accounts SET held = held + 1",
    "L3": "UPDATE accounts SET balance = balance + 1",
    "L4": "UPDATE accounts SET balance = balance + 1",
    "L5": UNGUARD + "DELETE FROM entries WHERE kind = 'release'" + GUARD,
    "L5-owner": UNGUARD
    + "UPDATE holds SET account_id = (SELECT id FROM accounts ORDER BY id DESC LIMIT 1)"
    + GUARD,
    "L6": UNGUARD + "UPDATE entries SET amount = amount - 1 WHERE kind = 'settle'" + GUARD,
    "L7": UNGUARD + "UPDATE entries SET kind = 'settle' WHERE kind = 'release'" + GUARD,
    "L8": "DROP TRIGGER holds_are_final ON holds",
    "L9": DROP % ("jobs", "ck_jobs_terminal_is_whole")
    + "UPDATE jobs SET state = 'completed', finished_at = now(), ended_running_at = now()",
    "L10": "ALTER TABLE entries ALTER COLUMN amount TYPE numeric",
    "L11": UNGUARD
    + "DELETE FROM entries USING holds WHERE holds.id = hold_id AND completion_id IS NOT NULL"
    + GUARD,
    "L12": "UPDATE completions SET tokens_charged = tokens_charged - 1 WHERE state = 'succeeded'",
    "R2": "UPDATE jobs SET n_succeeded = n_succeeded - 1",
    "R2-tokens": "UPDATE jobs SET tokens_charged = tokens_charged + 1",
    "R3": DROP % ("jobs", "ck_jobs_terminal_is_whole")
    + "UPDATE jobs SET state = 'completed', finished_at = now(), ended_running_at = now()",
    "R4": "UPDATE shards SET state = 'done', finished_at = now() WHERE state = 'pending'",
    "R5": "UPDATE shards SET lease_token = 999 WHERE state = 'done'",
    "R6": "UPDATE requests SET request_index = 9 WHERE request_index = 4",
    "R7": "UPDATE jobs SET cancel_requested_at = now()",
    "R8": "UPDATE shards SET end_index = 5 WHERE first_index = 2",
    "P1": "UPDATE parts SET superseded_at = now()",
    "P2": "INSERT INTO parts SELECT 998, job_id, 1, 2 FROM parts",
    "P3": "DELETE FROM result_files",
    "P3-token": "UPDATE shards SET lease_token = NULL WHERE state = 'done'",
    "P4": "INSERT INTO result_files (job_id, path, kind, rows, bytes, sha256) "
    "SELECT job_id, 'manifest.json', 'manifest', 0, 0, sha256 FROM result_files",
}


def a_completion(database, builders, worker_id) -> None:
    """A Completion that succeeded."""
    account_id, completion_id = builders.an_account(), new_uuid()
    with database.transaction() as conn:
        store_completion(
            conn, account_id, completion_id, model="tiny", specs=[a_spec()], seconds=60
        )
        claim_completion(conn, completion_id, worker_id, model="tiny")
        assert succeed_completion(conn, completion_id, worker_id, 2)


@pytest.fixture
def half_done(database, builders):
    """A Job of 6: a shard of two finished, one pending, one leased; and a Completion."""
    builders.an_account()
    job = builders.a_job(requests=6, shard_size=2)
    worker = builders.a_worker()
    shard = builders.a_lease(worker)
    with database.transaction() as conn:
        finish_shard(conn, shard, succeeded([0]) + errored([1]), named_part(shard))
    a_completion(database, builders, worker.worker_id)
    builders.an_account()
    with database.transaction() as conn:
        assert check_invariants(conn) == []
    return job


def test_every_invariant_is_tried_here() -> None:
    assert set(BREAKS) == {rule.name for rule in INVARIANTS}


@pytest.mark.usefixtures("half_done")
@pytest.mark.parametrize("name", BREAKS)
def test_an_invariant_sees_what_breaks_it(database, name) -> None:
    with database.transaction() as conn:
        conn.execute(BREAKS[name])
        broken = check_invariants(conn)
        conn.rollback()
    assert name in {violation.invariant for violation in broken}
    assert all(violation.subject and violation.detail for violation in broken)


LEASE = """
UPDATE shards SET state = 'leased', lease_token = 7, worker_id = job_id, lease_expires_at = now(),
    leased_at = now() WHERE id = (SELECT min(id) FROM shards WHERE state = 'pending')
"""
RETURN = """
UPDATE shards SET state = 'pending', lease_token = NULL, worker_id = NULL, lease_expires_at = NULL
WHERE lease_token = 7
"""
REVIVE = """
UPDATE requests SET state = 'pending', completion_tokens = NULL, finished_at = NULL
WHERE state = 'succeeded'
"""


@pytest.mark.usefixtures("half_done")
def test_the_history_sees_illegal_moves_and_tokens_that_come_again(database) -> None:
    with database.transaction() as conn:
        assert illegal_moves(conn) == []
        for change in (REVIVE, LEASE, RETURN, LEASE):
            conn.execute(change)
        wrong = illegal_moves(conn)
        conn.rollback()
    assert len(wrong) == 2
    assert "succeeded -> pending" in wrong[0]
    assert "came again" in wrong[1]


def test_a_finished_job_without_a_row_for_every_request_is_seen(database, builders) -> None:
    job = builders.a_job(requests=2, expires_in_seconds=-1)
    with database.transaction() as conn:
        expire_job(conn, job.id)
        begin_finalizing(conn, job.id)
        complete_job(conn, job.id, [])
        assert {violation.invariant for violation in check_invariants(conn)} == {"P1"}
