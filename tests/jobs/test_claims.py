"""Claiming, finishing, giving back, splitting: what one worker does with its leases."""

import pytest

from app.jobs.claims import (
    claim_shards,
    finish_shard,
    give_back_shard,
    has_claimable_work,
    load_work,
    renew_leases,
    split_off,
)
from app.jobs.lifecycle import cancel_job
from app.jobs.records import Control
from app.jobs.states import JobState
from app.kit.db import Database
from app.kit.ids import new_uuid
from tests.checker import check_everything
from tests.fixtures.builders import ENGINE, Builders, cancelled, errored, succeeded
from tests.fixtures.parts import named_part


def indices_of(database: Database, shard):
    with database.transaction() as conn:
        return [row.request_index for row in load_work(conn, shard)]


def states_of(database: Database, job_id):
    with database.transaction() as conn:
        rows = conn.execute(
            "SELECT state FROM requests WHERE job_id = %s ORDER BY request_index", [job_id]
        ).fetchall()
    return [row["state"] for row in rows]


def test_a_shard_goes_from_claim_to_done(database: Database, builders: Builders) -> None:
    job = builders.a_job(requests=10, shard_size=8, max_tokens=4)
    shard = builders.a_lease()
    claimed = builders.job(job.id)
    assert (claimed.state, claimed.engine, claimed.n_running) == ("in_progress", ENGINE, 8)
    check_everything(database)
    results = succeeded(range(6), completion_tokens=2) + errored([6, 7])
    with database.transaction() as conn:
        assert finish_shard(conn, shard, results, named_part(shard))
    job = builders.job(job.id)
    assert (job.n_succeeded, job.n_errored, job.n_running, job.n_pending) == (6, 2, 0, 2)
    assert (job.prompt_tokens, job.completion_tokens) == (30, 12)
    assert (job.tokens_charged, job.tokens_held) == (6 * 7, 2 * 9)
    assert job.tokens_released == 10 * 9 - job.tokens_charged - job.tokens_held
    check_everything(database)


def test_work_of_a_shard_is_its_pending_requests_in_order(database, builders) -> None:
    builders.a_job(requests=10, shard_size=4)
    assert indices_of(database, builders.a_lease()) == [0, 1, 2, 3]
    assert indices_of(database, builders.a_lease()) == [4, 5, 6, 7]
    assert indices_of(database, builders.a_lease()) == [8, 9]


def test_finishing_twice_with_the_same_token_is_true_and_changes_nothing(database, builders):
    job = builders.a_job(requests=2)
    shard = builders.a_lease()
    with database.transaction() as conn:
        assert finish_shard(conn, shard, succeeded([0, 1]), named_part(shard))
    before = builders.job(job.id)
    with database.transaction() as conn:
        assert finish_shard(conn, shard, succeeded([0, 1]), named_part(shard))
    assert builders.job(job.id) == before
    check_everything(database)


def test_a_shard_of_a_lost_lease_cannot_be_finished(database, builders) -> None:
    builders.a_job(requests=2)
    ghost = builders.a_lease()
    with database.transaction() as conn:
        assert give_back_shard(conn, ghost)
    again = builders.a_lease()
    assert again.id == ghost.id
    assert again.lease_token > ghost.lease_token
    with database.transaction() as conn:
        assert not finish_shard(conn, ghost, succeeded([0, 1]), named_part(ghost))
    check_everything(database)
    with database.transaction() as conn:
        assert finish_shard(conn, again, succeeded([0, 1]), named_part(again))
        assert not finish_shard(conn, ghost, succeeded([0, 1]), named_part(ghost))
    check_everything(database)


@pytest.mark.parametrize("missing", [[0], [0, 1, 2], []])
def test_results_that_are_not_the_shards_requests_are_refused(database, builders, missing):
    builders.a_job(requests=4, shard_size=2)
    shard = builders.a_lease()
    with pytest.raises(ValueError, match="do not match"), database.transaction() as conn:
        finish_shard(conn, shard, succeeded(missing), named_part(shard))
    assert states_of(database, shard.job_id) == ["pending"] * 4
    check_everything(database)


def test_results_without_a_part_are_refused(database, builders) -> None:
    builders.a_job(requests=1)
    shard = builders.a_lease()
    with pytest.raises(ValueError, match="no part"), database.transaction() as conn:
        finish_shard(conn, shard, succeeded([0]), None)


def test_a_request_is_cancelled_only_when_its_job_is(database, builders) -> None:
    builders.a_job(requests=1)
    shard = builders.a_lease()
    with pytest.raises(ValueError, match="but its Job"), database.transaction() as conn:
        finish_shard(conn, shard, cancelled([0]), None)


def test_what_cost_more_than_its_hold_is_charged_the_hold_and_counted(database, builders):
    job = builders.a_job(requests=1, max_tokens=4)
    shard = builders.a_lease()
    with database.transaction() as conn:
        finish_shard(conn, shard, succeeded([0], completion_tokens=9), named_part(shard))
        entry = conn.execute("SELECT amount, clipped FROM entries WHERE kind = 'settle'").fetchone()
    assert entry == {"amount": 9, "clipped": 5}
    assert builders.job(job.id).tokens_charged == 9
    check_everything(database)


def test_renewing_lengthens_leases_and_leaves_out_lost_ones(database, builders) -> None:
    builders.a_job(requests=4, shard_size=2)
    worker = builders.a_worker()
    kept, lost = (builders.a_lease(worker, lease_seconds=5) for _ in range(2))
    with database.transaction() as conn:
        give_back_shard(conn, lost)
        tokens = [kept.lease_token, lost.lease_token]
        assert renew_leases(conn, worker.worker_id, tokens, 500) == {
            kept.lease_token: Control(cancel=False, pause=False)
        }
        assert renew_leases(conn, new_uuid(), tokens, 500) == {}
        left = conn.execute(
            "SELECT lease_expires_at > now() + interval '400 s' AS long FROM shards "
            "WHERE state = 'leased'"
        ).fetchall()
    assert left == [{"long": True}]


def test_renewing_tells_of_cancel_pause_and_expiry(database, builders) -> None:
    worker = builders.a_worker()
    jobs, shards = [], []
    for _ in range(3):
        jobs.append(builders.a_job(requests=1))
        shards.append(builders.a_lease(worker))
    by_job = {shard.job_id: shard.lease_token for shard in shards}
    with database.transaction() as conn:
        cancel_job(conn, jobs[0].id)
        conn.execute("UPDATE jobs SET state = 'paused' WHERE id = %s", [jobs[1].id])
        conn.execute("UPDATE jobs SET expiry_began_at = now() WHERE id = %s", [jobs[2].id])
        controls = renew_leases(conn, worker.worker_id, list(by_job.values()), 60)
    assert [controls[by_job[job.id]] for job in jobs] == [
        Control(cancel=True, pause=False),
        Control(cancel=False, pause=True),
        Control(cancel=True, pause=False, expired=True),
    ]


def test_splitting_off_keeps_the_head_leased_and_the_tail_unattempted(database, builders):
    job = builders.a_job(requests=8, shard_size=8)
    worker = builders.a_worker()
    shard = builders.a_lease(worker)
    with database.transaction() as conn:
        head = split_off(conn, shard, 5)
    assert head is not None
    assert (head.first_index, head.end_index, head.lease_token) == (0, 5, shard.lease_token)
    assert builders.job(job.id).n_running == 5
    with database.transaction() as conn:
        assert split_off(conn, shard, 5) == head, "a repeated call finds its own effect"
        assert finish_shard(conn, head, succeeded(range(5)), named_part(head))
    check_everything(database)
    tail = builders.a_lease(worker)
    assert (tail.first_index, tail.end_index, tail.attempt) == (5, 8, 1)


def test_splitting_off_everything_gives_the_shard_back(database, builders) -> None:
    job = builders.a_job(requests=4)
    shard = builders.a_lease()
    with database.transaction() as conn:
        assert split_off(conn, shard, 0) is None
        assert split_off(conn, shard, 2) is None, "the lease is gone"
    assert (builders.job(job.id).n_running, builders.a_lease().attempt) == (0, 1)
    check_everything(database)


def test_what_is_given_back_of_a_cancelled_job_is_cancelled(database, builders) -> None:
    job = builders.a_job(requests=6, shard_size=6)
    shard = builders.a_lease()
    with database.transaction() as conn:
        cancel_job(conn, job.id)
        head = split_off(conn, shard, 4)
    assert head is not None
    assert states_of(database, job.id) == ["pending"] * 4 + ["cancelled"] * 2
    check_everything(database)
    with database.transaction() as conn:
        assert give_back_shard(conn, head)
    assert states_of(database, job.id) == ["cancelled"] * 6
    assert builders.job(job.id).tokens_held == 0
    check_everything(database)


def test_only_jobs_of_the_same_model_revision_dtype_and_engine_are_leased(database, builders):
    builders.a_job(requests=16, shard_size=8)
    others = [
        builders.a_worker(model="other"),
        builders.a_worker(model_revision="other"),
        builders.a_worker(dtype="bfloat16"),
    ]
    newer = builders.a_worker(engine="stub 2.0")
    with database.transaction() as conn:
        for other in others:
            assert claim_shards(conn, other, lease_seconds=60, shards_max=9) == []
        assert len(claim_shards(conn, newer, lease_seconds=60, shards_max=1)) == 1
        first = builders.a_worker()
        assert claim_shards(conn, first, lease_seconds=60, shards_max=9) == []
        assert len(claim_shards(conn, newer, lease_seconds=60, shards_max=9)) == 1


@pytest.mark.parametrize("state", ["paused", "cancelling", "finalizing"])
def test_shards_of_a_job_that_does_not_run_are_not_leased(database, builders, state) -> None:
    job = builders.a_job(requests=1)
    worker = builders.a_worker()
    with database.transaction() as conn:
        conn.execute(
            "UPDATE jobs SET state = %s, cancel_requested_at = now(), ended_running_at = now() "
            "WHERE id = %s",
            [state, job.id],
        )
        assert claim_shards(conn, worker, lease_seconds=60, shards_max=1) == []
        assert not has_claimable_work(conn, "tiny")


def test_a_worker_that_is_not_ready_or_drains_gets_nothing(database, builders) -> None:
    builders.a_job(requests=1)
    worker = builders.a_worker()
    with database.transaction() as conn:
        assert has_claimable_work(conn, "tiny")
        for change in ("drain_requested = true", "drain_requested = false, state = 'starting'"):
            conn.execute(f"UPDATE workers SET {change}")
            assert claim_shards(conn, worker, lease_seconds=60, shards_max=1) == []


def test_accounts_take_turns_whatever_the_size_of_their_jobs(database, builders) -> None:
    worker = builders.a_worker()
    large, small = builders.an_account(), builders.an_account()
    builders.a_job(account_id=large, requests=40, shard_size=1)
    builders.a_job(account_id=small, requests=10, shard_size=1)
    order = []
    for _ in range(20):
        shard = builders.a_lease(worker)
        order.append(shard.account_id)
        with database.transaction() as conn:
            finish_shard(conn, shard, succeeded([shard.first_index]), named_part(shard))
    assert order.count(large) == order.count(small) == 10
    assert all(first != second for first, second in zip(order[::2], order[1::2], strict=True))


def test_the_account_with_fewest_leased_shards_is_next(database, builders) -> None:
    busy, idle = builders.an_account(), builders.an_account()
    builders.a_job(account_id=busy, requests=9, shard_size=1)
    worker = builders.a_worker()
    with database.transaction() as conn:
        assert len(claim_shards(conn, worker, lease_seconds=60, shards_max=3)) == 3
    builders.a_job(account_id=idle, requests=9, shard_size=1)
    assert [builders.a_lease(worker).account_id for _ in range(3)] == [idle] * 3
    with database.transaction() as conn:
        leased = claim_shards(conn, worker, lease_seconds=60, shards_max=3)
    assert len(leased) == 1, "others wait, so nobody takes several at once"


def test_priority_goes_before_age_within_an_account(builders) -> None:
    account = builders.an_account()
    jobs = [
        builders.a_job(account_id=account, requests=1, priority=priority)
        for priority in (1, 0, 2, 1)
    ]
    worker = builders.a_worker()
    leased = [builders.a_lease(worker).job_id for _ in jobs]
    assert leased == [jobs[1].id, jobs[0].id, jobs[3].id, jobs[2].id]


def test_a_job_whose_last_shard_is_leased_does_not_hide_the_next_one(database, builders) -> None:
    account = builders.an_account()
    first = builders.a_job(account_id=account, requests=1)
    second = builders.a_job(account_id=account, requests=1)
    worker = builders.a_worker()
    assert builders.a_lease(worker).job_id == first.id
    assert builders.a_lease(worker).job_id == second.id
    assert builders.job(first.id).state is JobState.in_progress
