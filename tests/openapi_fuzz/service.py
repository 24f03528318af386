"""A whole service to send anything to, and what must hold once it has had enough.

Its worker has a stub for an engine, or vLLM with TILLER_SCHEMATHESIS_ENGINE=vllm.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from fastapi import FastAPI

from app.main import create_app
from tests.checker import check_everything
from tests.faults.cluster import Cluster, running_cluster
from tests.fixtures.api import a_key
from tests.fixtures.tiny_model import HIDDEN_SIZE
from tests.openapi_fuzz.narrowed import FINISHED_PROMPT
from tests.patching.serving import serving

BALANCE = 10**9
STEADY = "tests.openapi_fuzz.steady_worker"
SETTLED_SECONDS = 120.0
ENGINE = os.environ.get("TILLER_SCHEMATHESIS_ENGINE", "stub")
ON_VLLM = ENGINE == "vllm"
VLLM_START_SECONDS = 400.0
# What leases and heartbeats need beside an engine that keeps every processor busy.
UNHURRIED_WORKER = {"TILLER_LEASE_SECONDS": "30", "TILLER_HEARTBEAT_SECONDS": "1"}


@dataclass(frozen=True)
class Service:
    """A service with one account, a finished Job that has captured, and a stored vector."""

    cluster: Cluster
    app: FastAPI
    address: str
    account_id: UUID
    key: str
    job_id: str
    path: str  # of a file of the Job
    vector_id: str

    def client(self) -> httpx.Client:
        """Give a client that sends the account's key."""
        return httpx.Client(
            base_url=self.address, headers={"authorization": f"Bearer {self.key}"}, timeout=60
        )

    def check(self) -> None:
        """Wait until nothing is open any more; then every promise holds and no token is held."""
        self.cluster.wait(lambda: not self._open(), "everything to end", SETTLED_SECONDS)
        check_everything(self.cluster.database, self.cluster.store)
        (account,) = self.cluster.rows("SELECT held, balance FROM accounts")
        assert account["held"] == 0, "a Hold is open although everything has ended"
        assert 0 < account["balance"] < BALANCE, "something ran and was charged"

    def _open(self) -> bool:
        (row,) = self.cluster.rows(
            """
            SELECT (SELECT count(*) FROM jobs WHERE finished_at IS NULL)
                + (SELECT count(*) FROM completions WHERE finished_at IS NULL) AS live
            """
        )
        return bool(row["live"])


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster with one worker of the engine that was asked for."""
    assert ENGINE in ("stub", "vllm"), f"TILLER_SCHEMATHESIS_ENGINE is {ENGINE!r}"
    if not ON_VLLM:
        with running_cluster(folder) as cluster:
            cluster.start_worker(STEADY)
            cluster.wait_ready()
            yield cluster
        return
    # Imported here: torch takes seconds, and the stub does without.
    from tests.openapi_fuzz.real_model import write_real_model

    settings = {"models_file": write_real_model(folder / "real")}
    with running_cluster(folder, settings=settings, environment=UNHURRIED_WORKER) as cluster:
        cluster.start_worker("worker")
        cluster.wait_ready(VLLM_START_SECONDS)
        yield cluster


@contextlib.contextmanager
def running_service(folder: Path) -> Iterator[Service]:
    """Run a service until the end of the block, and check what it leaves."""
    with _cluster(folder) as cluster:
        account_id, key = a_key(cluster.database, balance=BALANCE)
        app = create_app(cluster.settings)
        with serving(app) as address:
            headers = {"authorization": f"Bearer {key}"}
            with httpx.Client(base_url=address, headers=headers, timeout=60) as client:
                job_id, vector_id = _finished_job(client), stored_vector(client)
                manifest = client.get(f"/v1/jobs/{job_id}/manifest").raise_for_status().json()
            path = manifest["files"][0]["path"]
            service = Service(
                cluster,
                app,
                address,
                account_id,
                key,
                job_id=job_id,
                path=path,
                vector_id=vector_id,
            )
            yield service
            service.check()


def _finished_job(client: httpx.Client) -> str:
    request = {"prompt": FINISHED_PROMPT, "max_tokens": 2, "output_residual_stream": [1]}
    sent = client.post("/v1/jobs", json={"model": "tiny", "requests": [request]})
    job: dict[str, Any] = sent.raise_for_status().json()
    while job["status"] != "completed":
        assert job["status"] in ("queued", "in_progress", "finalizing"), job
        job = client.get(f"/v1/jobs/{job['id']}?wait=30").raise_for_status().json()
    return str(job["id"])


def stored_vector(client: httpx.Client) -> str:
    """Store the vector (again: the same numbers have the same id)."""
    body = {"activations": [float(i) for i in range(HIDDEN_SIZE)], "name": "of the tests"}
    return str(client.post("/v1/steering_vectors", json=body).raise_for_status().json()["id"])
