"""Workers die or stand still in the middle of a group: it runs again whole, once for all.

The worker is the real one around a stub engine, in processes of its own.
"""

import signal

import pytest

from app.jobs.records import Job
from tests.faults.cluster import Cluster, running_cluster
from tests.faults.published import assert_as_in_a_clean_run, specs_of
from tests.faults.stub_engine import DIES

GROUP = 32
COUNT = 5 * GROUP - 3
GROUPS = [(first, min(first + GROUP, COUNT)) for first in range(0, COUNT, GROUP)]


@pytest.fixture
def cluster(tmp_path):
    with running_cluster(tmp_path) as running:
        yield running


def parts(cluster: Cluster, job: Job) -> list[tuple[int, int]]:
    """The ranges of the parts that count."""
    rows = cluster.rows(
        """
        SELECT first_index, end_index FROM parts
        WHERE job_id = %(id)s AND superseded_at IS NULL ORDER BY first_index
        """,
        id=job.id,
    )
    return [(row["first_index"], row["end_index"]) for row in rows]


def attempts(cluster: Cluster, job: Job) -> list[int]:
    rows = cluster.rows(
        "SELECT attempt FROM shards WHERE job_id = %(id)s ORDER BY first_index", id=job.id
    )
    return [row["attempt"] for row in rows]


def busy_with_group(cluster: Cluster):
    """Wait for a worker that has all requests of a group in its engine."""
    return cluster.wait(
        lambda: next(
            (
                worker
                for worker in cluster.workers
                if cluster.rows(
                    """
                    SELECT 1 FROM workers JOIN shards ON worker_id = workers.id
                    WHERE pid = %(pid)s AND shards.state = 'leased' AND requests_running > 1
                    """,
                    pid=worker.pid,
                )
            ),
            None,
        ),
        "a group in the middle of its run",
    )


def test_a_group_whose_worker_is_killed_runs_again_whole(cluster):
    cluster.start_workers(2, STUB_SECONDS="1.5")
    specs = specs_of(COUNT)
    job = cluster.a_job(specs=specs, shard_size=GROUP, reproducible=True)
    for _ in range(3):
        victim = busy_with_group(cluster)
        starts = len(victim.exits)
        victim.send(signal.SIGKILL)
        cluster.wait(lambda w=victim, n=starts: len(w.exits) > n, "the supervisor")
    cluster.wait_finished(job)
    cluster.check()
    assert_as_in_a_clean_run(cluster, job, specs)
    assert parts(cluster, job) == GROUPS
    assert sum(attempts(cluster, job)) == len(GROUPS) + 3, "one attempt more for each kill"
    ended = cluster.job(job)
    assert (ended.state, ended.n_succeeded) == ("completed", COUNT)
    assert ended.tokens_charged == sum(spec.tokens_held for spec in specs)


def test_a_group_whose_worker_stands_still_past_its_lease_runs_again_whole(cluster):
    cluster.start_workers(2, STUB_SECONDS="1")
    specs = specs_of(COUNT)
    job = cluster.a_job(specs=specs, shard_size=GROUP, reproducible=True)
    ghost = busy_with_group(cluster)
    pid = ghost.send(signal.SIGSTOP)
    cluster.wait_finished(job)
    ghost.send(signal.SIGCONT)
    cluster.wait(lambda: pid in cluster.ready_pids(), "the ghost to beat again")
    cluster.check()
    assert_as_in_a_clean_run(cluster, job, specs)
    assert parts(cluster, job) == GROUPS


def test_a_request_that_kills_engines_costs_its_group_its_size_and_nothing_else(cluster):
    cluster.start_workers(1)
    specs = specs_of(COUNT, special={37: DIES})
    job = cluster.a_job(specs=specs, shard_size=GROUP, reproducible=True)
    cluster.wait_finished(job, seconds=120)
    cluster.check()
    assert_as_in_a_clean_run(cluster, job, specs, without={37})
    (row,) = cluster.rows("SELECT request_index, error_code FROM requests WHERE state = 'errored'")
    assert (row["request_index"], row["error_code"]) == (37, "engine_died")
    assert [part for part in parts(cluster, job) if part in GROUPS] == [GROUPS[0], *GROUPS[2:]]
