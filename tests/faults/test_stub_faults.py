"""Workers, Postgres and Redis die or stand still; states, charges and results stay right.

The worker is the real one around a stub engine, in processes of its own. After every run all
invariants hold, files included, and the results are those of a run without faults.
"""

import random
import signal

import pytest

from app.jobs.lifecycle import cancel_job
from app.jobs.records import Job
from tests.faults.cluster import RECONCILE_SECONDS, Cluster, running_cluster
from tests.faults.published import settle_down, specs_of, texts_of
from tests.faults.stub_engine import DIES, FAILS, HANGS
from worker.failpoints import KILLED

SLOW = {"STUB_SECONDS": "0.25"}


@pytest.fixture
def cluster(tmp_path):
    with running_cluster(tmp_path) as running:
        yield running


def states(cluster: Cluster, job: Job) -> dict[str, int]:
    rows = cluster.rows(
        "SELECT state, count(*) AS n FROM requests WHERE job_id = %(id)s GROUP BY state", id=job.id
    )
    return {row["state"]: row["n"] for row in rows}


def errors(cluster: Cluster, job: Job) -> dict[int, str]:
    rows = cluster.rows(
        """
        SELECT request_index, error_code FROM requests
        WHERE job_id = %(id)s AND state = 'errored'
        """,
        id=job.id,
    )
    return {row["request_index"]: row["error_code"] for row in rows}


def leased_token(cluster: Cluster, job: Job) -> int | None:
    """The token of the Job's first leased shard."""
    rows = cluster.rows(
        "SELECT lease_token FROM shards WHERE job_id = %(id)s AND state = 'leased' LIMIT 1",
        id=job.id,
    )
    return rows[0]["lease_token"] if rows else None


def tokens_of(cluster: Cluster, pid: int) -> set[int]:
    """The lease tokens that a worker process holds."""
    rows = cluster.rows(
        """
        SELECT lease_token FROM shards JOIN workers ON workers.id = worker_id
        WHERE shards.state = 'leased' AND pid = %(pid)s
        """,
        pid=pid,
    )
    return {row["lease_token"] for row in rows}


def test_workers_killed_in_the_middle_of_jobs_lose_and_double_nothing(cluster):
    cluster.start_workers(2, **SLOW)
    specs = specs_of(2000)
    jobs = [cluster.a_job(specs=specs, shard_size=256)]
    for _ in range(10):
        if cluster.job(jobs[-1]).finished_at is not None:
            jobs.append(cluster.a_job(specs=specs, shard_size=256))
        cluster.wait_busy()
        leased = cluster.leased_pids()
        victim = random.choice([w for w in cluster.workers if w.pid in leased] or cluster.workers)
        starts = len(victim.exits)
        victim.send(signal.SIGKILL)
        cluster.wait(lambda w=victim, n=starts: len(w.exits) > n, "the supervisor")
    cluster.wait_finished(*jobs, seconds=90)
    for job in jobs:
        settle_down(cluster, job, specs)
    assert sum(status == -signal.SIGKILL for w in cluster.workers for status in w.exits) == 10


def test_a_stopped_worker_wakes_up_past_its_lease_and_changes_nothing(cluster):
    cluster.start_workers(2, **SLOW)
    specs = specs_of(600)
    for _ in range(3):
        job = cluster.a_job(specs=specs, shard_size=64)
        ghost = cluster.wait_busy()
        pid = ghost.send(signal.SIGSTOP)
        stale = tokens_of(cluster, pid)
        cluster.wait_finished(job)
        ghost.send(signal.SIGCONT)
        cluster.wait(lambda p=pid: p in cluster.ready_pids(), "the ghost to beat again")
        settle_down(cluster, job, specs)
        named = cluster.rows("SELECT lease_token FROM parts WHERE job_id = %(id)s", id=job.id)
        assert not stale & {row["lease_token"] for row in named}
        assert ghost.process.poll() is None, "a ghost gives up its shards, not its life"


def test_a_write_under_a_lost_lease_is_refused_and_its_files_are_deleted(cluster):
    # The ghost stands still between publishing its part and naming it, every time.
    ghost = cluster.start_worker(failpoint="part_published:stop")
    heir = cluster.start_worker(STUB_SECONDS="1.5")
    cluster.wait_ready()
    specs = specs_of(1)  # a shard of one is not split: heir and ghost hold the very same range
    for _ in range(3):
        heir.send(signal.SIGSTOP)
        job = cluster.a_job(specs=specs)
        cluster.wait(ghost.is_stopped, "the ghost to stop")
        stale = leased_token(cluster, job)
        assert cluster.files_of(job.id, stale)
        heir.send(signal.SIGCONT)
        token = cluster.wait(
            lambda j=job, s=stale: (t := leased_token(cluster, j)) != s and t, "a new lease"
        )
        ghost.send(signal.SIGCONT)
        cluster.wait(
            lambda j=job, s=stale: not cluster.files_of(j.id, s), "the ghost to delete its files"
        )
        assert leased_token(cluster, job) in (token, None)
        settle_down(cluster, job, specs)
        assert cluster.files_of(job.id, token)
    assert ghost.log_text().count("fenced off") == 3


def test_postgres_killed_under_load_costs_nothing_but_time(cluster):
    cluster.start_workers(2, **SLOW)
    specs = specs_of(2000)
    job = cluster.a_job(specs=specs, shard_size=128)
    for _ in range(3):
        before = cluster.job(job).n_terminal
        cluster.wait(
            lambda n=before: cluster.job(job).n_terminal > n and cluster.leased_pids(),
            "progress",
        )
        assert cluster.job(job).finished_at is None
        cluster.kill_postgres()
    settle_down(cluster, job, specs)


def test_a_request_that_kills_engines_is_the_only_one_that_fails(cluster):
    cluster.start_workers(2)
    specs = specs_of(100, special={37: DIES})
    job = cluster.a_job(specs=specs, shard_size=25)
    settle_down(cluster, job, specs, without={37})
    assert errors(cluster, job) == {37: "engine_died"}
    # Once with its neighbours, once for each halving of 25, and three times alone.
    deaths = [status for worker in cluster.workers for status in worker.exits]
    assert 3 <= len(deaths) <= 9
    (row,) = cluster.rows(
        "SELECT deaths_alone FROM shards WHERE job_id = %(id)s AND deaths_alone > 0", id=job.id
    )
    assert row["deaths_alone"] == 3


def test_a_request_that_fails_by_itself_leaves_its_neighbours_alone(cluster):
    cluster.start_workers(1)
    specs = specs_of(30, special={4: FAILS, 29: FAILS})
    job = cluster.a_job(specs=specs, shard_size=16)
    settle_down(cluster, job, specs, without={4, 29})
    assert errors(cluster, job) == {4: "steering_failed", 29: "steering_failed"}
    assert cluster.workers[0].exits == []


def test_a_job_cancelled_while_it_runs_keeps_and_charges_what_had_finished(cluster):
    cluster.start_workers(1, **SLOW)
    hanging = dict.fromkeys(range(40, 60), HANGS)
    specs = specs_of(400, special=hanging)
    job = cluster.a_job(specs=specs, shard_size=20)
    cluster.wait(lambda: cluster.job(job).n_succeeded >= 20, "finished shards")
    cluster.database.run(lambda conn: cancel_job(conn, job.id))
    cluster.wait_finished(job)
    cluster.check()
    ended = cluster.job(job)
    assert ended.state == "cancelled"
    assert states(cluster, job) == {
        "succeeded": ended.n_succeeded,
        "cancelled": 400 - ended.n_succeeded,
    }
    assert 20 <= ended.n_succeeded < 400
    kept = texts_of(cluster, job)
    assert len(kept) == ended.n_succeeded
    assert ended.tokens_charged == sum(specs[index].tokens_held for index in kept)
    assert ended.tokens_released == sum(s.tokens_held for s in specs) - ended.tokens_charged


def test_sigterm_gives_back_at_once_what_was_not_started(cluster):
    worker = cluster.start_worker(STUB_SECONDS="1")
    cluster.wait_ready()
    specs = specs_of(400)
    job = cluster.a_job(specs=specs, shard_size=200)
    cluster.wait(
        lambda: cluster.rows("SELECT 1 FROM workers WHERE requests_running > 0"), "running requests"
    )
    worker.keep = False
    worker.send(signal.SIGTERM)
    # A second to finish what runs; what was not started needs no lease to run out.
    assert worker.process.wait(timeout=5) == 0
    halfway = cluster.job(job)
    assert halfway.n_running == 0
    assert 0 < halfway.n_succeeded < 400
    rows = cluster.rows(
        "SELECT DISTINCT state, attempt FROM shards WHERE job_id = %(id)s", id=job.id
    )
    assert {(row["state"], row["attempt"]) for row in rows} == {("done", 1), ("pending", 0)}
    worker.keep = True
    settle_down(cluster, job, specs)


def test_a_worker_ends_soon_after_sigterm_idle_or_not_yet_ready(cluster):
    for seconds, state in (("60", "starting"), ("0", "ready")):
        worker = cluster.start_worker(STUB_START_SECONDS=seconds)
        cluster.wait(
            lambda w=worker, s=state: (
                {"pid": w.pid, "state": s} in cluster.rows("SELECT pid, state FROM workers")
            ),
            f"a worker that is {state}",
        )
        worker.keep = False
        worker.send(signal.SIGTERM)
        assert worker.process.wait(timeout=20) == 0
    assert cluster.rows("SELECT DISTINCT state FROM workers") == [{"state": "gone"}]


@pytest.mark.parametrize("point", ["register_worker", "worker_ready", "build_worker"])
def test_a_worker_that_is_told_to_stop_while_it_starts_ends(cluster, point):
    worker = cluster.start_worker("tests.faults.early_stop_worker", STOP_AT=point)
    worker.keep = False
    assert worker.process.wait(timeout=60) == 0, worker.log_text()
    assert cluster.rows("SELECT DISTINCT state FROM workers") == [{"state": "gone"}]


@pytest.mark.parametrize("point", ["after_claim", "after_engine", "part_published", "after_finish"])
def test_a_worker_that_dies_at_a_named_point_is_survived(cluster, point):
    worker = cluster.start_worker(failpoint=point)
    cluster.wait_ready()
    specs = specs_of(24)
    job = cluster.a_job(specs=specs, shard_size=8)
    settle_down(cluster, job, specs)
    assert worker.exits == [KILLED], "the point was hit, once"


def test_without_redis_nothing_is_lost(cluster):
    cluster.start_workers(2)
    cluster.kill_redis()
    specs = specs_of(100)
    job = cluster.a_job(specs=specs, shard_size=16)
    assert cluster.job(job).n_running == 0
    cluster.redis.start()
    settle_down(cluster, job, specs)
    assert all(worker.exits == [] for worker in cluster.workers)


def start_delay(cluster: Cluster, job: Job) -> float:
    """Seconds between the Job's creation and the first lease, by the clock of Postgres."""
    (row,) = cluster.rows(
        """
        SELECT extract(epoch FROM min(leased_at) - created_at)::float8 AS seconds
        FROM jobs JOIN shards ON shards.job_id = jobs.id WHERE jobs.id = %(id)s
        GROUP BY jobs.id
        """,
        id=job.id,
    )
    return row["seconds"]


def test_with_every_message_lost_the_reconciler_starts_the_work(cluster):
    cluster.start_workers(1)
    specs = specs_of(10)
    job = cluster.a_job(specs=specs, wake=False)
    settle_down(cluster, job, specs)
    # One period with its jitter, and the second that a message may take.
    assert start_delay(cluster, job) < 1.2 * RECONCILE_SECONDS + 1.0


def test_without_a_reconciler_an_idle_worker_starts_within_a_second(cluster):
    cluster.start_workers(1)
    cluster.stop_reconciler()
    specs = specs_of(10)
    for _ in range(3):
        job = cluster.a_job(specs=specs)
        settle_down(cluster, job, specs)
        assert start_delay(cluster, job) < 1.0
