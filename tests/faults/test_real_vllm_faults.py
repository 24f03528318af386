"""The product's own worker with vLLM and steering, killed and frozen in the middle of one Job.

Engine starts are slow, so the suite runs a few faults of each kind; TILLER_FAULT_KILLS=10/3/3
(kills of the worker, stops past the lease, kills of Postgres) runs as many as a release needs.
"""

import io
import os
import signal
from collections import Counter

import psutil
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from app.kit.ids import parse_id
from app.main import create_app
from app.storage import job_key
from tests.engine.tiny_model import make_tiny_llama
from tests.faults.cluster import Cluster, WorkerProcess, running_cluster
from tests.fixtures.api import a_key

REQUESTS = 1000
SHARD_REQUESTS = 20
TOKENS = 64
HIDDEN = 64
KILLS, STOPS, POSTGRES_KILLS = map(int, os.environ.get("TILLER_FAULT_KILLS", "3/1/1").split("/"))
ENGINE_ENDS_SECONDS = 10.0
START_SECONDS = 120.0
FROZEN_SECONDS = 60.0  # the lease, and what Postgres grants an idle transaction


@pytest.fixture
def cluster(tmp_path):
    model = make_tiny_llama(tmp_path / "llama")
    models_file = tmp_path / "served.toml"
    # A small batch, so that one Job lasts for all the faults.
    models_file.write_text(
        f'[models.tiny]\npath = "{model}"\ndtype = "float32"\nmax_num_seqs = 16\n'
        "max_num_batched_tokens = 512\nkv_cache_bytes = 67108864\nthreads = 1\n"
    )
    settings = {"models_file": models_file, "shard_requests_max": SHARD_REQUESTS}
    environment = {"TILLER_LEASE_SECONDS": "5", "TILLER_HEARTBEAT_SECONDS": "1"}
    with running_cluster(tmp_path, settings=settings, environment=environment) as running:
        yield running


def a_request(index: int) -> dict[str, object]:
    """One of four kinds: plain, steered, captured, both; no two alike."""
    request: dict[str, object] = {"prompt": [3 + (index * k) % 250 for k in range(1, 8)]}
    if index % 2:
        vector = [((index + k) % 7 - 3) / 10 for k in range(HIDDEN)]
        request["apply_steering_vectors"] = [
            {"activations": [vector], "layer_indices": [index % 4], "scale": 0.5}
        ]
    if index % 4 >= 2:
        request["output_residual_stream"] = [1, 3]
    return request


def engine_processes(worker: WorkerProcess) -> list[psutil.Process]:
    return psutil.Process(worker.pid).children(recursive=True)


def wait_progress(cluster: Cluster, job_id) -> None:
    """Wait until a shard was finished from now on, and more is running."""

    def state() -> dict[str, int | None]:
        (row,) = cluster.rows(
            """
            SELECT n_succeeded, n_running, n_total,
                (SELECT count(*) FROM shards WHERE job_id = jobs.id AND state = 'done') AS done
            FROM jobs WHERE id = %(id)s
            """,
            id=job_id,
        )
        return row

    before = state()["done"]

    def moved() -> bool:
        now = state()
        assert now["n_succeeded"] < now["n_total"], "the Job ended before all the faults"
        return now["done"] > before and now["n_running"] > 0

    cluster.wait(moved, "a finished shard", START_SECONDS)


def kill_worker(cluster: Cluster, worker: WorkerProcess) -> None:
    """Kill -9 the worker; its engine must not outlive it for long."""
    engine = engine_processes(worker)
    assert engine, "the engine runs in a process of its own"
    starts = len(worker.exits)
    worker.send(signal.SIGKILL)
    _, left = psutil.wait_procs(engine, timeout=ENGINE_ENDS_SECONDS)
    assert not left
    cluster.wait(lambda: len(worker.exits) > starts, "the supervisor")


def stop_past_lease(cluster: Cluster, worker: WorkerProcess) -> set[int]:
    """Freeze the worker until all its leases are gone; return the tokens that were taken from it.

    A transaction that was on its way when the worker froze may still have finished a shard: that
    lease ended rightly and is not one of them.
    """
    worker.send(signal.SIGSTOP)
    query = "SELECT lease_token FROM shards WHERE state = 'leased'"
    stale = {row["lease_token"] for row in cluster.rows(query)}
    assert stale
    # A worker that froze inside a transaction keeps its locks until Postgres ends the session.
    cluster.wait(lambda: not cluster.rows(query), "leases to run out", FROZEN_SECONDS)
    finished = {row["lease_token"] for row in cluster.rows("SELECT lease_token FROM parts")}
    worker.send(signal.SIGCONT)
    return stale - finished


def assert_published(cluster: Cluster, client: TestClient, job: dict) -> None:
    """Every request lies in exactly one file of the manifest, its captured rows too."""
    job_id = parse_id("job", job["id"])
    manifest = client.get(f"/v1/jobs/{job['id']}/manifest").json()
    assert manifest["complete"]
    results: dict[int, dict] = {}
    captured: Counter[tuple[int, int]] = Counter()
    for file in manifest["files"]:
        content = io.BytesIO(cluster.store.get_bytes(job_key(job_id, file["path"])))
        if file["kind"] == "results":
            for row in pq.read_table(content).to_pylist():
                assert row["request_index"] not in results
                results[row["request_index"]] = row
        elif file["kind"] == "activations":
            table = pq.ParquetFile(content).read(columns=["request_index"])
            captured.update((i, file["layer"]) for i in table.column(0).to_pylist())
    assert sorted(results) == list(range(REQUESTS))
    assert {row["status"] for row in results.values()} == {"succeeded"}
    rows = {
        (index, layer): row["prompt_tokens"] + len(row["token_ids"]) - 1
        for index, row in results.items()
        for layer in a_request(index).get("output_residual_stream", [])
    }
    assert captured == rows
    for index, row in results.items():
        assert bool(row["steering"]) == bool(index % 2), index


@pytest.mark.timeout(1200)
def test_a_job_on_vllm_survives_dead_and_frozen_workers_and_postgres(cluster):
    _, key = a_key(cluster.database, balance=10_000_000)
    worker = cluster.start_worker("worker")
    with TestClient(
        create_app(cluster.settings), headers={"authorization": f"Bearer {key}"}
    ) as client:
        answer = client.post(
            "/v1/jobs",
            json={
                "model": "tiny",
                "requests": [a_request(index) for index in range(REQUESTS)],
                "defaults": {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
            },
        )
        assert answer.status_code == 202, answer.text
        job = answer.json()
        job_id = parse_id("job", job["id"])
        stale: set[int] = set()
        for _ in range(KILLS):
            wait_progress(cluster, job_id)
            kill_worker(cluster, worker)
        for _ in range(STOPS):
            wait_progress(cluster, job_id)
            stale |= stop_past_lease(cluster, worker)
        for _ in range(POSTGRES_KILLS):
            wait_progress(cluster, job_id)
            cluster.kill_postgres()
        cluster.wait(
            lambda: cluster.builders.job(job_id).finished_at, "the Job to end", START_SECONDS
        )
        assert worker.exits == [-signal.SIGKILL] * KILLS
        cluster.check()
        ended = cluster.builders.job(job_id)
        assert (ended.state, ended.n_succeeded) == ("completed", REQUESTS)
        assert ended.tokens_charged == ended.prompt_tokens + ended.completion_tokens
        assert ended.completion_tokens == REQUESTS * TOKENS
        named = cluster.rows("SELECT lease_token FROM parts WHERE job_id = %(id)s", id=job_id)
        assert not stale & {row["lease_token"] for row in named}
        assert_published(cluster, client, job)
    engine = engine_processes(worker)
    worker.end()
    assert engine
    _, left = psutil.wait_procs(engine, timeout=ENGINE_ENDS_SECONDS)
    assert not left
    assert not cluster.marked(), "no process of these workers outlives them"
