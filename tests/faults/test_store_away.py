"""The object store, a real S3 endpoint, goes away while a Job runs, and comes back."""

import pytest

from tests.faults.cluster import running_cluster
from tests.faults.published import settle_down, specs_of
from tests.storage.gateway import Gateway

REFUSED = "the object store is away"
REQUESTS, SHARD = 3000, 150
# With the short leases of fault runs, a machine that stands still for a moment splits a shard.
LONG_LEASES = {"TILLER_LEASE_SECONDS": "30"}


@pytest.fixture
def gateway(tmp_path, monkeypatch):
    running = Gateway(tmp_path / "s3")
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    yield running
    running.stop()


def test_a_job_waits_for_its_store_and_no_request_of_it_runs_twice(gateway, tmp_path):
    with running_cluster(
        tmp_path, settings={"object_store": gateway.url}, environment=LONG_LEASES
    ) as cluster:
        cluster.start_workers(2, STUB_SECONDS="0.6")  # longer in all than a gateway takes to stop
        specs = specs_of(REQUESTS)
        job = cluster.a_job(specs=specs, shard_size=SHARD)
        cluster.wait(lambda: cluster.job(job).n_terminal, "a part")
        gateway.stop()
        for worker in cluster.workers:
            cluster.wait(lambda w=worker: REFUSED in w.log_text(), "a part that is refused", 90)
        before = cluster.job(job)
        assert before.finished_at is None
        gateway.start()
        settle_down(cluster, job, specs)
        shards = cluster.rows("SELECT first_index, attempt FROM shards ORDER BY first_index")
        assert [tuple(row.values()) for row in shards] == [
            (at, 1) for at in range(0, REQUESTS, SHARD)
        ]
