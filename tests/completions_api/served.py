"""The API on a port beside a cluster with stub workers, and an account with a key."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI

from app.main import create_app
from tests.faults.cluster import Cluster, running_cluster
from tests.fixtures.api import a_key
from tests.patching.serving import serving

BALANCE = 10_000


@dataclass
class Served:
    """A cluster, a client of its API, and the one account of the tests."""

    cluster: Cluster
    client: httpx.Client
    account_id: UUID
    app: FastAPI

    def complete(self, **fields: Any) -> httpx.Response:
        """Post a Completion (of three token ids when no prompt is given)."""
        body = {"model": "tiny", "prompt": [6, 7, 8], "max_tokens": 4, **fields}
        return self.client.post("/v1/completions", json=body)

    def begin(self, **fields: Any) -> "Pending":
        """Post a Completion in a thread."""
        return Pending(self, fields)

    def balance(self) -> tuple[int, int]:
        """What the account has, and what of it is held."""
        (row,) = self.cluster.rows(
            "SELECT balance, held FROM accounts WHERE id = %(id)s", id=self.account_id
        )
        return row["balance"], row["held"]

    def states(self) -> list[str]:
        """The states of all Completions, oldest first."""
        return [r["state"] for r in self.cluster.rows("SELECT state FROM completions ORDER BY id")]

    def wait_state(self, state: str, seconds: float = 30.0) -> None:
        """Wait until the last Completion is in a state."""
        self.cluster.wait(lambda: self.states()[-1:] == [state], f"{state} Completion", seconds)


class Pending:
    """An answer on its way."""

    def __init__(self, served: Served, fields: dict[str, Any]) -> None:
        self._answer: httpx.Response | None = None

        def post() -> None:
            with contextlib.suppress(httpx.TransportError):
                self._answer = served.complete(**fields)

        self._thread = threading.Thread(target=post, daemon=True)
        self._thread.start()

    def answer(self, seconds: float = 40.0) -> httpx.Response:
        """Wait for the answer."""
        self._thread.join(seconds)
        assert self._answer is not None, "no answer"
        return self._answer


START_SECONDS = 400.0  # vLLM on a busy machine


@contextlib.contextmanager
def vllm_serving(model: Path, *, dtype: str, heartbeat_seconds: float) -> Iterator[Served]:
    """Run a worker with vLLM and a small batch on a model's folder, and the API beside it."""
    folder = model.parent
    models_file = folder / "served.toml"
    models_file.write_text(
        f'[models.tiny]\npath = "{model}"\ndtype = "{dtype}"\nmax_num_seqs = 4\n'
        "max_num_batched_tokens = 512\nkv_cache_bytes = 67108864\nthreads = 1\n",
        encoding="utf-8",
    )
    environment = {
        "TILLER_LEASE_SECONDS": "30",
        "TILLER_HEARTBEAT_SECONDS": str(heartbeat_seconds),
    }
    settings = {"models_file": models_file}
    with running_cluster(folder, settings=settings, environment=environment) as cluster:
        cluster.start_worker("worker")
        cluster.wait_ready(START_SECONDS)
        with api_beside(cluster) as served:
            yield served


@contextlib.contextmanager
def api_beside(cluster: Cluster) -> Iterator[Served]:
    """Serve the API of a cluster; whatever a test did, all promises are kept at the end."""
    account_id, key = a_key(cluster.database, balance=BALANCE)
    app = create_app(cluster.settings)
    with (
        serving(app) as address,
        httpx.Client(
            base_url=address, headers={"authorization": f"Bearer {key}"}, timeout=60
        ) as client,
    ):
        yield Served(cluster, client, account_id, app)
        cluster.check()


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    """A cluster without workers and its API."""
    with running_cluster(tmp_path) as cluster, api_beside(cluster) as running:
        yield running
