"""Cancel, expire, finalize, complete: the moves of a Job that no worker makes."""

import pytest
from psycopg import errors as pg

from app.jobs.claims import claim_shards, finish_shard, has_claimable_work
from app.jobs.lifecycle import (
    JobNotFinishedError,
    begin_finalizing,
    cancel_job,
    complete_job,
    due_jobs,
    expire_job,
    finishable_jobs,
    get_job,
    try_lock_finalizer,
)
from app.jobs.records import PublishedFile
from app.kit.ids import new_uuid
from tests.checker import check_everything
from tests.fixtures.builders import cancelled, errored, succeeded
from tests.fixtures.parts import named_part

MANIFEST = PublishedFile(path="manifest.json", kind="manifest", rows=0, bytes=2, sha256="a" * 64)


def finish(database, shard, results, *, part=True):
    with database.transaction() as conn:
        assert finish_shard(conn, shard, results, named_part(shard) if part else None)


def complete(database, job_id, files=()):
    with database.transaction() as conn:
        assert begin_finalizing(conn, job_id) is not None
    with database.transaction() as conn:
        return complete_job(conn, job_id, files)


def overdue(database, job_id):
    with database.transaction() as conn:
        conn.execute("UPDATE jobs SET expires_at = now() - interval '1 s' WHERE id = %s", [job_id])


def test_a_job_ends_completed_with_its_files_named(database, builders) -> None:
    job = builders.a_job(requests=2)
    finish(database, builders.a_lease(), succeeded([0]) + errored([1]))
    with database.transaction() as conn:
        assert finishable_jobs(conn, 10) == [job.id]
    done = complete(database, job.id, [MANIFEST])
    assert (done.state, done.error_code, done.tokens_held) == ("completed", None, 0)
    assert done.finished_at is not None
    check_everything(database)


def test_a_job_of_which_nothing_succeeded_ends_failed(database, builders) -> None:
    job = builders.a_job(requests=2)
    finish(database, builders.a_lease(), errored([0, 1]))
    done = complete(database, job.id)
    assert (done.state, done.error_code, done.tokens_charged) == (
        "failed",
        "no_request_succeeded",
        0,
    )
    check_everything(database)


def test_completing_again_changes_nothing(database, builders) -> None:
    job = builders.a_job(requests=1)
    finish(database, builders.a_lease(), succeeded([0]))
    done = complete(database, job.id, [MANIFEST])
    with database.transaction() as conn:
        assert complete_job(conn, job.id, [MANIFEST, MANIFEST]) == done
        assert begin_finalizing(conn, job.id) is None
        assert finishable_jobs(conn, 10) == []


def test_a_job_with_requests_left_is_neither_finalized_nor_completed(database, builders) -> None:
    job = builders.a_job(requests=2, shard_size=1)
    finish(database, builders.a_lease(), succeeded([0]))
    with database.transaction() as conn:
        assert finishable_jobs(conn, 10) == []
        assert begin_finalizing(conn, job.id) is None
    for job_id in (job.id, new_uuid()):
        with pytest.raises(JobNotFinishedError), database.transaction() as conn:
            complete_job(conn, job_id, [])


def test_postgres_itself_refuses_a_terminal_job_with_requests_left(database, builders) -> None:
    job = builders.a_job(requests=2)
    with pytest.raises(pg.CheckViolation), database.transaction() as conn:
        conn.execute(
            "UPDATE jobs SET state = 'completed', finished_at = now(), ended_running_at = now() "
            "WHERE id = %s",
            [job.id],
        )


def test_cancelling_a_waiting_job_ends_it_at_once(database, builders) -> None:
    account = builders.an_account(balance=1000)
    job = builders.a_job(account_id=account, requests=5, shard_size=2)
    with database.transaction() as conn:
        after = cancel_job(conn, job.id, account_id=account)
    assert (after.state, after.n_cancelled, after.tokens_held) == ("cancelling", 5, 0)
    assert complete(database, job.id).state == "cancelled"
    with database.transaction() as conn:
        row = conn.execute("SELECT balance, held FROM accounts").fetchone()
    assert row == {"balance": 1000, "held": 0}


def test_cancelling_leaves_leased_requests_to_their_worker(database, builders) -> None:
    job = builders.a_job(requests=6, shard_size=3)
    shard = builders.a_lease()
    with database.transaction() as conn:
        after = cancel_job(conn, job.id)
    assert (after.n_cancelled, after.n_running) == (3, 3)
    check_everything(database)
    finish(database, shard, succeeded([0]) + cancelled([1, 2]))
    after = builders.job(job.id)
    assert (after.n_succeeded, after.n_cancelled, after.tokens_charged) == (1, 5, 7)
    assert complete(database, job.id).state == "cancelled"


def test_cancelling_is_repeatable_and_never_touches_a_finished_job(database, builders) -> None:
    job = builders.a_job(requests=2)
    with database.transaction() as conn:
        first = cancel_job(conn, job.id)
        assert cancel_job(conn, job.id) == first
    done = complete(database, job.id)
    with database.transaction() as conn:
        assert cancel_job(conn, job.id) == done


def test_a_job_that_is_done_but_not_yet_finalized_is_not_cancelled(database, builders) -> None:
    job = builders.a_job(requests=1)
    finish(database, builders.a_lease(), succeeded([0]))
    with database.transaction() as conn:
        assert cancel_job(conn, job.id).cancel_requested_at is None
    assert complete(database, job.id).state == "completed"


def test_another_accounts_job_is_not_found(database, builders) -> None:
    job = builders.a_job(requests=1)
    stranger = builders.an_account()
    with database.transaction() as conn:
        assert get_job(conn, job.id, account_id=stranger) is None
        assert cancel_job(conn, job.id, account_id=stranger) is None
        assert cancel_job(conn, new_uuid()) is None
    assert builders.job(job.id) == job


@pytest.mark.parametrize("state", ["queued", "paused"])
def test_an_overdue_job_expires(database, builders, state) -> None:
    job = builders.a_job(requests=4, shard_size=2, state=state)
    overdue(database, job.id)
    worker = builders.a_worker()
    with database.transaction() as conn:
        assert not has_claimable_work(conn, "tiny")
        assert claim_shards(conn, worker, lease_seconds=60, shards_max=1) == []
        assert due_jobs(conn, 10) == [job.id]
        assert expire_job(conn, job.id)
        assert not expire_job(conn, job.id)
        assert due_jobs(conn, 10) == []
    after = builders.job(job.id)
    assert (after.n_expired, after.tokens_held) == (4, 0)
    check_everything(database)
    assert complete(database, job.id).state == "expired"


def test_what_ran_when_a_job_expired_is_published_and_charged(database, builders) -> None:
    job = builders.a_job(requests=6, shard_size=3)
    worker = builders.a_worker()
    shard = builders.a_lease(worker)
    overdue(database, job.id)
    with database.transaction() as conn:
        assert expire_job(conn, job.id)
        assert claim_shards(conn, worker, lease_seconds=60, shards_max=9) == []
    check_everything(database)
    finish(database, shard, succeeded([0]) + cancelled([1, 2]))
    check_everything(database)
    done = complete(database, job.id)
    assert (done.state, done.n_succeeded, done.n_expired, done.tokens_charged) == (
        "expired",
        1,
        5,
        7,
    )


def test_a_job_whose_last_requests_succeeded_after_its_time_is_completed(database, builders):
    job = builders.a_job(requests=2)
    shard = builders.a_lease()
    overdue(database, job.id)
    with database.transaction() as conn:
        assert expire_job(conn, job.id)
    finish(database, shard, succeeded([0, 1]))
    assert complete(database, job.id).state == "completed"


def test_one_finalizer_a_job_at_a_time(database, builders) -> None:
    job, other = builders.a_job(requests=1), builders.a_job(requests=1)
    with database.transaction() as first, database.transaction() as second:
        assert try_lock_finalizer(first, job.id)
        assert not try_lock_finalizer(second, job.id)
        assert try_lock_finalizer(second, other.id)
    with database.transaction() as conn:
        assert try_lock_finalizer(conn, job.id)
