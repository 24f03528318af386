"""Each duty of the reconciler, alone: what it repairs, what it leaves, what it counts."""

import time
from collections.abc import Callable
from contextlib import closing
from uuid import UUID

import psycopg
import pytest

from app.accounts.accounts import create_account
from app.errors import UnavailableError
from app.jobs.claims import finish_shard
from app.jobs.lifecycle import try_lock_job
from app.jobs.records import WorkerStats
from app.jobs.workers import worker_heartbeat
from app.kit.db import session_settings
from app.reconcile import steps
from tests.checker import check_everything
from tests.fixtures.builders import errored, succeeded
from tests.fixtures.parts import named_part


class Bell:
    """Notes which models were woken; the broker is away for those in `deaf`."""

    def __init__(self, deaf: frozenset[str] = frozenset()) -> None:
        self.deaf = deaf
        self.woken: list[str] = []

    def wake(self, model: str) -> bool:
        self.woken.append(model)
        return model not in self.deaf


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def worker_state(database, worker) -> str:
    with database.transaction() as conn:
        row = conn.execute("SELECT state FROM workers WHERE id = %s", [worker.worker_id]).fetchone()
    return row["state"]


def test_expired_leases_of_many_jobs_end_in_one_round(database, builders) -> None:
    worker = builders.a_worker()
    jobs = [builders.a_job(requests=4, shard_size=2) for _ in range(3)]
    for _ in range(6):
        builders.a_lease(worker, lease_seconds=0)
    assert steps.expire_leases(database) == 6
    assert steps.expire_leases(database) == 0
    assert [builders.job(job.id).n_running for job in jobs] == [0, 0, 0]
    check_everything(database)


def test_a_client_that_froze_within_a_statement_gives_its_locks_back(database, builders) -> None:
    job = builders.a_job(requests=2)
    # Closed, not committed: the connection is dead by then.
    with closing(psycopg.connect(database.url, **session_settings())) as frozen:
        frozen.execute("SELECT 1 FROM jobs WHERE id = %s FOR UPDATE", [job.id])
        # Sent, but not its end: as a process that was stopped between the two.
        frozen.pgconn.enter_pipeline_mode()
        frozen.pgconn.send_query_params(b"SELECT 1", None)
        frozen.pgconn.send_flush_request()
        while frozen.pgconn.flush():
            pass

        def free() -> bool:
            with database.transaction() as conn:
                return try_lock_job(conn, job.id) is not None

        assert not free()
        assert steps.end_silent_sessions(database) == 0, "it has not been silent for long"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steps, "CLIENT_SILENT_SECONDS", 0.0)
            wait_until(lambda: steps.end_silent_sessions(database) == 1)
        wait_until(free)


def test_sessions_that_are_only_slow_are_left_alone(database) -> None:
    with (
        psycopg.connect(database.url, **session_settings()) as idle,
        pytest.MonkeyPatch.context() as patch,
    ):
        idle.execute("SELECT 1")
        patch.setattr(steps, "CLIENT_SILENT_SECONDS", 0.0)
        steps.end_silent_sessions(database)
        assert idle.execute("SELECT 2 AS two").fetchone() == {"two": 2}


def test_overdue_jobs_expire_and_others_stay(database, builders) -> None:
    overdue = [builders.a_job(requests=2, expires_in_seconds=-1) for _ in range(2)]
    fresh = builders.a_job(requests=2)
    assert steps.expire_jobs(database) == 2
    assert steps.expire_jobs(database) == 0
    assert [builders.job(job.id).n_expired for job in overdue] == [2, 2]
    assert builders.job(fresh.id) == fresh
    check_everything(database)


def test_a_job_that_cannot_be_finished_does_not_hold_up_the_others(database, builders) -> None:
    worker = builders.a_worker()
    jobs = [builders.a_job(requests=1) for _ in range(3)]
    for _ in jobs:
        shard = builders.a_lease(worker)
        with database.transaction() as conn:
            finish_shard(conn, shard, errored([0]), named_part(shard))
    tried: list[UUID] = []

    def finalize(job_id: UUID) -> None:
        tried.append(job_id)
        if len(tried) == 1:
            raise OSError("the object store is away")

    assert steps.finish_jobs(database, finalize) == 3
    assert sorted(tried) == sorted(job.id for job in jobs)


def test_only_models_with_waiting_shards_are_woken(database, builders) -> None:
    builders.a_job(requests=2, model="waits")
    builders.a_job(requests=2, model="waits")
    builders.a_job(requests=2, model="paused", state="paused")
    builders.a_job(requests=2, model="overdue", expires_in_seconds=-1)
    builders.a_job(requests=1)
    shard = builders.a_lease()
    assert shard.end_index == 1
    bell = Bell()
    assert steps.wake_models(database, bell) == 1
    assert bell.woken == ["waits"]
    assert steps.wake_models(database, Bell(deaf=frozenset({"waits"}))) == 0


def test_a_silent_worker_is_gone_until_it_is_heard_again(database, builders) -> None:
    silent, alive = builders.a_worker(), builders.a_worker()
    with database.transaction() as conn:
        conn.execute(
            "UPDATE workers SET heartbeat_at = now() - interval '301 s' WHERE id = %s",
            [silent.worker_id],
        )
    assert steps.mark_dead_workers(database) == 1
    assert steps.mark_dead_workers(database) == 0
    assert [worker_state(database, w) for w in (silent, alive)] == ["gone", "ready"]
    with database.transaction() as conn:
        assert not worker_heartbeat(conn, silent.worker_id, WorkerStats()).drain
    assert worker_state(database, silent) == "ready"


def test_idempotency_keys_are_forgotten_after_a_week(database) -> None:
    with database.transaction() as conn:
        account = create_account(conn, "an account")
        for key, days in (("old", 8), ("young", 6)):
            conn.execute(
                "INSERT INTO idempotency_keys (account_id, key, fingerprint, created_at) "
                "VALUES (%s, %s, %s, now() - make_interval(days => %s))",
                [account, key, b"\0" * 32, days],
            )
    assert steps.forget_old_idempotency_keys(database) == 1
    with database.transaction() as conn:
        assert conn.execute("SELECT key FROM idempotency_keys").fetchall() == [{"key": "young"}]


def test_the_audit_finds_nothing_in_a_healthy_service(database, builders) -> None:
    builders.a_job(requests=2)
    shard = builders.a_lease()
    with database.transaction() as conn:
        finish_shard(conn, shard, succeeded([0, 1]), named_part(shard))
    assert steps.audit(database) == []
    with database.transaction() as conn:
        create_account(conn, "the connection can write again")


def test_the_audit_reports_a_wrong_balance_and_stops_that_accounts_holds(
    database, builders, caplog
) -> None:
    sound, wrong = builders.an_account(), builders.an_account()
    with database.transaction() as conn:
        conn.execute("UPDATE accounts SET balance = balance + 5 WHERE id = %s", [wrong])
    broken = steps.audit(database)
    assert {violation.invariant for violation in broken} == {"L3", "L4"}
    assert "invariant broken" in caplog.text
    builders.a_job(account_id=sound, requests=1)
    with pytest.raises(UnavailableError):
        builders.a_job(account_id=wrong, requests=1)
