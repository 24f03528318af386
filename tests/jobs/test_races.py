"""Many connections at once: claims never meet, fences hold, nobody deadlocks."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import psycopg
import pytest

from app.jobs.claims import (
    claim_shards,
    expire_leases,
    finish_shard,
    give_back_shard,
    load_work,
    renew_leases,
    report_engine_death,
    split_off,
)
from app.jobs.lifecycle import cancel_job, expire_job, finishable_jobs
from app.kit.db import Database
from app.ledger.invariants import LEDGER_INVARIANTS, find_violations
from tests.checker import check_everything
from tests.fixtures.builders import cancelled, insert_job, succeeded
from tests.fixtures.parts import named_part


def together(*works: Callable[[], object]) -> list[object]:
    """Run each in a thread of its own, all starting at the same moment; re-raise a failure."""
    start = threading.Barrier(len(works))
    results: list[object] = [None] * len(works)
    failures: list[BaseException] = []

    def run(number: int, work: Callable[[], object]) -> None:
        try:
            start.wait(10)
            results[number] = work()
        except BaseException as error:  # noqa: BLE001 (shown by the main thread)
            failures.append(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def transaction(database: Database, work):
    def run():
        with database.transaction() as conn:
            return work(conn)

    return run


def test_claimers_never_get_the_same_shard(database, builders) -> None:
    for _ in range(3):
        builders.a_job(requests=40, shard_size=1)
    workers = [builders.a_worker() for _ in range(6)]

    def claim_all(worker):
        def run():
            leased = []
            while True:
                with database.transaction() as conn:
                    got = claim_shards(conn, worker, lease_seconds=60, shards_max=3)
                if not got:
                    return leased
                leased += got

        return run

    leased = [shard for shards in together(*map(claim_all, workers)) for shard in shards]
    assert len(leased) == 120
    assert max(Counter(shard.id for shard in leased).values()) == 1
    assert max(Counter(shard.lease_token for shard in leased).values()) == 1
    check_everything(database)


def test_two_engines_that_claim_a_new_job_at_once_never_share_it(database, builders) -> None:
    for _ in range(10):
        builders.a_job(requests=4, shard_size=1)
    workers = [builders.a_worker(engine=engine) for engine in ("stub 1.0", "stub 2.0") * 2]

    def claim_ten(worker):
        def run():
            leased = []
            for _ in range(10):
                with database.transaction() as conn:
                    leased += claim_shards(conn, worker, lease_seconds=60, shards_max=1)
            return {(shard.job_id, worker.engine) for shard in leased}

        return run

    pairs = set().union(*together(*map(claim_ten, workers)))
    assert len(pairs) == len({job_id for job_id, _ in pairs}) == 10


def test_a_cancel_and_a_claim_of_the_same_job_have_an_order(database, builders) -> None:
    worker = builders.a_worker()
    for _ in range(15):
        job = builders.a_job(requests=4, shard_size=2)
        leased, after = together(
            transaction(database, lambda c: claim_shards(c, worker, lease_seconds=9, shards_max=1)),
            transaction(database, lambda c, job=job: cancel_job(c, job.id)),
        )
        now = builders.job(job.id)
        assert now.n_running == sum(shard.end_index - shard.first_index for shard in leased)
        assert now.n_cancelled == 4 - now.n_running
        check_everything(database)
        for shard in leased:
            indices = range(shard.first_index, shard.end_index)
            with database.transaction() as conn:
                assert finish_shard(conn, shard, cancelled(indices), None)
        assert builders.job(job.id).n_cancelled == 4
        assert after is not None


def test_of_a_finish_and_an_expiry_exactly_one_happens(database, builders) -> None:
    worker = builders.a_worker()
    outcomes = Counter()
    for _ in range(30):
        builders.a_job(requests=2)
        shard = builders.a_lease(worker, lease_seconds=0)
        finished, expired = together(
            transaction(
                database,
                lambda c, shard=shard: finish_shard(c, shard, succeeded([0, 1]), named_part(shard)),
            ),
            transaction(database, lambda c: expire_leases(c, 10)),
        )
        outcomes[finished, expired] += 1
        state = builders.job(shard.job_id)
        assert state.n_succeeded == (2 if finished else 0)
        check_everything(database)
        with database.transaction() as conn:
            cancel_job(conn, shard.job_id)
    # A reconciler that meets the worker's lock passes by: then the lease was finished, too.
    assert set(outcomes) <= {(True, 0), (False, 1)}, outcomes


def test_two_reports_of_the_same_shard_are_one(database, builders) -> None:
    for _ in range(10):
        job = builders.a_job(requests=3)
        shard = builders.a_lease()
        finish = transaction(
            database,
            lambda c, shard=shard: finish_shard(c, shard, succeeded([0, 1, 2]), named_part(shard)),
        )
        assert together(finish, finish, finish) == [True, True, True]
        assert builders.job(job.id).tokens_charged == 21
    check_everything(database)


class Storm:
    """Everybody at once on a few Jobs for a while: workers, reconcilers, users, an auditor."""

    def __init__(self, database: Database, jobs, workers, accounts, seed: int) -> None:
        self.database, self.jobs, self.workers, self.accounts = database, jobs, workers, accounts
        self.seed = seed
        self.done = threading.Event()
        self.failures: list[BaseException] = []
        self.counts: Counter[str] = Counter()

    def work(self, worker, chance: random.Random) -> None:
        with self.database.transaction() as conn:
            leased = claim_shards(conn, worker, lease_seconds=0.05, shards_max=2)
        for shard in leased:
            self.counts["leased"] += 1
            if chance.random() < 0.2:
                time.sleep(0.06)  # a worker that stalls longer than its lease: the fault itself
            with self.database.transaction() as conn:
                renew_leases(conn, worker.worker_id, [item.lease_token for item in leased], 0.05)
            with self.database.transaction() as conn:
                self.end(conn, shard, chance.random())

    def end(self, conn, shard, fate: float) -> None:
        if fate < 0.1:
            give_back_shard(conn, shard)
        elif fate < 0.2:
            report_engine_death(conn, shard, alone=False)
        else:
            head = split_off(conn, shard, shard.first_index + 2) if fate < 0.4 else shard
            if head is None:
                return
            rows = load_work(conn, head)
            owned = rows and rows[-1].request_index < head.end_index
            results = succeeded([row.request_index for row in rows])
            try:
                landed = bool(owned) and finish_shard(conn, head, results, named_part(head))
            except ValueError:
                # The lease was lost between reading and finishing, and somebody else holds it.
                landed = False
            self.counts["landed" if landed else "fenced"] += 1

    def reconcile(self, chance: random.Random) -> None:
        with self.database.transaction() as conn:
            self.counts["expired"] += expire_leases(conn, chance.randint(1, 4))

    def disturb(self, chance: random.Random) -> None:
        job_id = chance.choice(self.jobs)
        with self.database.transaction() as conn:
            if chance.random() < 0.1:
                cancel_job(conn, job_id)
            elif chance.random() < 0.1:
                conn.execute(
                    "UPDATE jobs SET expires_at = now() - interval '1 s' "
                    "WHERE id = %s AND finished_at IS NULL",
                    [job_id],
                )
                expire_job(conn, job_id)
            else:
                job = insert_job(conn, chance.choice(self.accounts), requests=20, shard_size=5)
                self.jobs.append(job.id)
        time.sleep(0.02)  # a user's pace

    def audit(self, _chance: random.Random) -> None:
        with self.database.transaction() as conn:
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            assert find_violations(conn, LEDGER_INVARIANTS) == []
        self.counts["audits"] += 1

    def loop(self, number: int, act) -> None:
        chance = random.Random(self.seed + number)
        try:
            while not self.done.is_set():
                act(chance)
        except BaseException as error:  # noqa: BLE001 (shown by the main thread)
            self.failures.append(error)

    def rage(self, seconds: float) -> None:
        acts = [lambda c, worker=worker: self.work(worker, c) for worker in self.workers]
        acts += [self.reconcile, self.reconcile, self.disturb, self.audit]
        threads = [threading.Thread(target=self.loop, args=item) for item in enumerate(acts)]
        for thread in threads:
            thread.start()
        self.done.wait(seconds)
        self.done.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_everybody_leaves_every_promise_kept(database_url, builders, seed) -> None:
    accounts = [builders.an_account(balance=10_000_000) for _ in range(2)]
    jobs = [builders.a_job(account_id=a, requests=60, shard_size=6).id for a in accounts]
    workers = [builders.a_worker() for _ in range(3)]
    pool = Database(database_url, size_max=12)
    try:
        storm = Storm(pool, jobs, workers, accounts, seed)
        storm.rage(4.0)
        assert storm.failures == []
        assert min(storm.counts[name] for name in ("landed", "fenced", "expired", "audits")) > 0
        check_everything(pool)
        drain(pool, workers[0])
        check_everything(pool)
        with pool.transaction() as conn:
            left = conn.execute(
                "SELECT count(*) AS n FROM holds WHERE NOT EXISTS "
                "(SELECT 1 FROM entries WHERE hold_id = holds.id)"
            ).fetchone()
            assert left == {"n": 0}
            assert set(finishable_jobs(conn, 10_000)) == set(storm.jobs)
    finally:
        pool.close()


def drain(pool: Database, worker) -> None:
    """Finish all that is left, as one healthy worker and one reconciler do."""
    with pool.transaction() as conn:
        conn.execute("UPDATE shards SET lease_expires_at = now() WHERE state = 'leased'")
    while True:
        with pool.transaction() as conn:
            expired = expire_leases(conn, 100)
        with pool.transaction() as conn:
            shards = claim_shards(conn, worker, lease_seconds=60, shards_max=50)
            for shard in shards:
                indices = [row.request_index for row in load_work(conn, shard)]
                assert finish_shard(conn, shard, succeeded(indices), named_part(shard))
        if not shards and not expired:
            return


def test_a_claim_waits_for_a_job_that_is_being_changed(database, builders) -> None:
    """With one Job only, passing a locked one by would leave the worker idle."""
    builders.a_job(requests=2, shard_size=1)
    worker = builders.a_worker()
    got: list[object] = []

    def claim() -> None:
        with database.transaction() as conn:
            got.extend(claim_shards(conn, worker, lease_seconds=60, shards_max=1))

    with database.transaction() as conn:
        conn.execute("UPDATE jobs SET name = 'renamed'")
        thread = threading.Thread(target=claim)
        thread.start()
        wait_for_lock(database)
    thread.join()
    assert len(got) == 1


def wait_for_lock(database: Database) -> None:
    deadline = time.monotonic() + 10
    with psycopg.connect(database.url, autocommit=True) as conn:
        while time.monotonic() < deadline:
            row = conn.execute(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE wait_event_type = 'Lock' AND datname = current_database()"
            ).fetchone()
            if row and row[0]:
                return
            time.sleep(0.005)
    raise AssertionError("nobody waits for a lock")
