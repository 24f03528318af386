"""Leases that end without their worker: expiry, ghosts, engine deaths."""

import pytest

from app.jobs.claims import (
    expire_leases,
    finish_shard,
    give_back_shard,
    renew_leases,
    report_engine_death,
    split_off,
)
from app.jobs.lifecycle import cancel_job
from tests.checker import check_everything
from tests.fixtures.builders import Builders, errored, succeeded
from tests.fixtures.parts import named_part


def shards_of(database, job_id):
    with database.transaction() as conn:
        rows = conn.execute(
            """
            SELECT first_index, end_index, state, attempt, engine_deaths FROM shards
            WHERE job_id = %s ORDER BY first_index
            """,
            [job_id],
        ).fetchall()
    return [tuple(row.values()) for row in rows]


def test_an_expired_lease_splits_its_shard_in_two(database, builders) -> None:
    job = builders.a_job(requests=5, shard_size=5)
    builders.a_lease(lease_seconds=0)
    with database.transaction() as conn:
        assert expire_leases(conn, 10) == 1
        assert expire_leases(conn, 10) == 0
    assert shards_of(database, job.id) == [(0, 2, "pending", 1, 0), (2, 5, "pending", 1, 0)]
    assert builders.job(job.id).n_running == 0
    check_everything(database)


def test_an_expired_lease_of_one_request_makes_it_wait_again_and_never_errs_it(database, builders):
    job = builders.a_job(requests=1)
    for attempt in range(1, 6):
        assert builders.a_lease(lease_seconds=0).attempt == attempt
        with database.transaction() as conn:
            assert expire_leases(conn, 10) == 1
    assert shards_of(database, job.id) == [(0, 1, "pending", 5, 0)]
    check_everything(database)


def test_a_fixed_group_comes_back_whole(database, builders) -> None:
    job = builders.a_job(requests=6, shard_size=6, reproducible=True)
    builders.a_lease(lease_seconds=0)
    with database.transaction() as conn:
        expire_leases(conn, 10)
    assert shards_of(database, job.id) == [(0, 6, "pending", 1, 0)]


def test_a_fixed_group_is_never_given_back_in_part(database, builders) -> None:
    job = builders.a_job(requests=6, shard_size=6, reproducible=True)
    shard = builders.a_lease()
    assert shard.run_alone
    with database.transaction() as conn:
        assert split_off(conn, shard, 4) is None
        assert not finish_shard(conn, shard, succeeded(range(4)), named_part(shard))
    assert shards_of(database, job.id) == [(0, 6, "pending", 0, 0)]
    assert builders.job(job.id).n_running == 0
    check_everything(database)


def test_a_fixed_group_in_which_engines_die_is_split_after_the_third_death(
    database, builders
) -> None:
    """Its culprit must be found; from then on its requests run in smaller groups."""
    job = builders.a_job(requests=6, shard_size=6, reproducible=True)
    for deaths in (1, 2):
        assert not die_alone(database, builders.a_lease())
        assert shards_of(database, job.id) == [(0, 6, "pending", deaths, deaths)]
    assert not die_alone(database, builders.a_lease())
    assert shards_of(database, job.id) == [(0, 3, "pending", 3, 3), (3, 6, "pending", 3, 3)]
    check_everything(database)


def test_a_lease_that_was_renewed_in_time_does_not_expire(database, builders) -> None:
    builders.a_job(requests=1)
    worker = builders.a_worker()
    shard = builders.a_lease(worker, lease_seconds=0)
    with database.transaction() as conn:
        assert shard.lease_token in renew_leases(conn, worker.worker_id, [shard.lease_token], 60)
        assert expire_leases(conn, 10) == 0


def test_a_ghost_writes_nothing_whatever_it_tries(database, builders) -> None:
    job = builders.a_job(requests=4, shard_size=4)
    worker = builders.a_worker()
    ghost = builders.a_lease(worker, lease_seconds=0)
    with database.transaction() as conn:
        expire_leases(conn, 10)
    heir = builders.a_lease(worker)
    assert heir.id == ghost.id, "the first half keeps the shard's row"
    before = shards_of(database, job.id)
    with database.transaction() as conn:
        assert not finish_shard(conn, ghost, succeeded([0, 1]), named_part(ghost))
        assert not give_back_shard(conn, ghost)
        assert split_off(conn, ghost, 1) is None
        assert split_off(conn, ghost, 0) is None
        assert not report_engine_death(conn, ghost, alone=True)
        assert renew_leases(conn, worker.worker_id, [ghost.lease_token], 60) == {}
    assert shards_of(database, job.id) == before
    check_everything(database)
    with database.transaction() as conn:
        assert finish_shard(conn, heir, succeeded([0, 1]), named_part(heir))
    check_everything(database)


def test_leases_of_a_cancelled_job_end_with_cancelled_requests(database, builders) -> None:
    job = builders.a_job(requests=4, shard_size=2)
    builders.a_lease(lease_seconds=0)
    with database.transaction() as conn:
        cancel_job(conn, job.id)
    check_everything(database)
    with database.transaction() as conn:
        assert expire_leases(conn, 10) == 1
    now = builders.job(job.id)
    assert (now.n_cancelled, now.tokens_held, now.tokens_charged) == (4, 0, 0)
    check_everything(database)


def test_expiring_is_limited_and_goes_on_in_the_next_call(database, builders) -> None:
    builders.a_job(requests=6, shard_size=2)
    worker = builders.a_worker()
    for _ in range(3):
        builders.a_lease(worker, lease_seconds=0)
    with database.transaction() as conn:
        assert [expire_leases(conn, 2) for _ in range(3)] == [2, 1, 0]


def die_alone(database, shard):
    with database.transaction() as conn:
        return report_engine_death(conn, shard, alone=True)


def test_engine_deaths_narrow_a_shard_down_to_the_request_that_kills(database, builders) -> None:
    """Poison among 100 requests: only it is errored, by at most 2 log2(100) + 3 deaths."""
    poison, deaths = 37, 0
    job = builders.a_job(requests=100, shard_size=100)
    worker = builders.a_worker()
    while builders.job(job.id).n_terminal < 100:
        shard = builders.a_lease(worker)
        assert shard.run_alone == (deaths > 0)
        indices = range(shard.first_index, shard.end_index)
        if poison not in indices:
            results = succeeded(indices)
        else:
            deaths += 1
            if not die_alone(database, shard):
                continue
            results = errored([poison], code="engine_died")
        with database.transaction() as conn:
            assert finish_shard(conn, shard, results, named_part(shard))
    done = builders.job(job.id)
    assert (done.n_succeeded, done.n_errored) == (99, 1)
    assert deaths <= 2 * 6.7 + 3
    check_everything(database)


def test_a_request_beside_others_is_never_blamed(database, builders) -> None:
    job = builders.a_job(requests=1)
    worker = builders.a_worker()
    for _ in range(5):
        shard = builders.a_lease(worker)
        with database.transaction() as conn:
            assert not report_engine_death(conn, shard, alone=False)
    assert [die_alone(database, builders.a_lease(worker)) for _ in range(3)] == [False, False, True]
    assert builders.job(job.id).n_running == 1, "the caller still holds the lease"
    check_everything(database)


@pytest.mark.parametrize("alone", [True, False])
def test_an_engine_death_under_a_cancelled_job_cancels(database, builders: Builders, alone) -> None:
    job = builders.a_job(requests=1)
    shard = builders.a_lease()
    with database.transaction() as conn:
        cancel_job(conn, job.id)
        assert not report_engine_death(conn, shard, alone=alone)
    assert builders.job(job.id).n_cancelled == 1
    check_everything(database)


def test_only_leases_that_ran_out_end(database, builders) -> None:
    job = builders.a_job(requests=4, shard_size=2)
    worker = builders.a_worker()
    builders.a_lease(worker, lease_seconds=0)
    alive = builders.a_lease(worker, lease_seconds=60)
    with database.transaction() as conn:
        assert expire_leases(conn, 10) == 1
        assert list(renew_leases(conn, worker.worker_id, [alive.lease_token], 60)) == [
            alive.lease_token
        ]
    assert builders.job(job.id).n_running == 2


def test_a_finished_shard_is_left_alone_by_late_calls_with_its_token(database, builders) -> None:
    job = builders.a_job(requests=4, shard_size=4)
    shard = builders.a_lease()
    with database.transaction() as conn:
        assert finish_shard(conn, shard, succeeded(range(4)), named_part(shard))
    before = builders.job(job.id), shards_of(database, job.id)
    with database.transaction() as conn:
        assert split_off(conn, shard, 2) is None
        assert split_off(conn, shard, 0) is None
        assert not give_back_shard(conn, shard)
        assert not report_engine_death(conn, shard, alone=True)
    assert (builders.job(job.id), shards_of(database, job.id)) == before
    check_everything(database)
