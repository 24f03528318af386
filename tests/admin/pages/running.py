"""The dashboard beside a real worker around the stub engine, with Jobs in every state."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from fastapi.testclient import TestClient

from app.accounts.accounts import create_account, create_key
from app.kit.ids import parse_id
from app.ledger.holds import grant_tokens
from app.reconcile.samples import take_sample
from tests.admin.people import ROLES, Dashboard
from tests.faults.stub_engine import FAILS, HANGS
from tests.fixtures.api import PEPPER
from tests.rules.source_tree import ROOT

BAD = "<script>alert('x')</script>"
WAIT_SECONDS = 60


@dataclass
class Running:
    """What runs: the dashboard, and the public ids of its Jobs."""

    dashboard: Dashboard
    jobs: dict[str, str]
    key: str

    def number(self, name: str) -> UUID:
        """Give the bare id of a Job."""
        found = parse_id("job", self.jobs[name])
        assert found is not None
        return found

    def page(self, path: str) -> str:
        """Load a page as an admin."""
        answer = self.dashboard.browser("admin").get(path)
        assert answer.status_code == 200, answer.text
        return answer.text

    def job(self, name: str, path: str = "") -> str:
        """Load the page of a Job, or one below it."""
        return self.page(f"/admin/jobs/{self.jobs[name]}{path}")


def steering(scale: float) -> list[dict[str, Any]]:
    """Steer Layer 2 of the tiny model."""
    return [{"activations": [[1.0] * 8], "layer_indices": [2], "scale": scale}]


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def running(
    running_dashboard: Dashboard, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A service with a worker: Jobs that are done, errored, running, cancelled."""
    yield from _run(running_dashboard, tmp_path_factory.mktemp("worker"))


def _run(dashboard: Dashboard, folder: Path) -> Iterator[Running]:
    with dashboard.database.transaction() as conn:
        account = create_account(conn, f"lab {BAD}")
        grant_tokens(conn, account, 1_000_000, "opening grant")
        key = create_key(conn, account, PEPPER, name="user").secret
        operators = create_account(conn, "operators")
        for role in ROLES:
            made = create_key(conn, operators, PEPPER, name=role, scopes={"admin"}, role=role)
            dashboard.keys[role] = made.secret
    settings = dashboard.app.state.settings
    environment = {
        **os.environ,
        "TILLER_DATABASE_URL": settings.database_url,
        "TILLER_REDIS_URL": settings.redis_url,
        "TILLER_OBJECT_STORE": settings.object_store,
        "TILLER_MODELS_FILE": str(settings.models_file),
        "TILLER_KEY_PEPPER": PEPPER,
        "TILLER_SCRATCH_DIR": str(folder / "scratch"),
        "TILLER_HEARTBEAT_SECONDS": "0.3",
        "TILLER_CLAIM_POLL_SECONDS": "0.1",
    }
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.stub_worker", "--model", "tiny"],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        take_sample(dashboard.database)
        yield Running(dashboard, _submit(dashboard, key), key)
    finally:
        worker.kill()
        worker.wait()


def _submit(dashboard: Dashboard, key: str) -> dict[str, str]:
    client = TestClient(dashboard.app, headers={"authorization": f"Bearer {key}"})

    def submit(name: str, requests: list[dict[str, Any]], **fields: Any) -> str:
        body = {"model": "tiny", "name": name, "requests": requests, **fields}
        answer = client.post("/v1/jobs", json=body)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def ended(job: str) -> bool:
        return client.get(f"/v1/jobs/{job}").json()["finished_at"] is not None

    pairs = [
        {"prompt": f"Say {BAD}", "max_tokens": 6, "seed": 7, "custom_id": f"{scale}{BAD}"}
        | {"apply_steering_vectors": steering(scale)}
        for scale in (0, 4, -4)
    ]
    jobs = {"pairs": submit(f"pairs {BAD}", pairs, metadata={BAD: BAD})}
    mixed = [{"prompt": [FAILS, 9]} if k % 10 == 3 else {"prompt": "hi"} for k in range(120)]
    jobs["errors"] = submit("errors", mixed)
    wait_until(lambda: all(map(ended, jobs.values())), "two Jobs to end")
    jobs["running"] = submit("running", [{"prompt": [HANGS, 1]}] * 3)
    wait_until(
        lambda: client.get(f"/v1/jobs/{jobs['running']}").json()["request_counts"]["running"] == 3,
        "a Job to run",
    )
    return jobs


def sha256(data: bytes) -> str:
    """Give the digest as files have it."""
    return hashlib.sha256(data).hexdigest()


def end_cancelled(dashboard: Dashboard, job_id: UUID) -> None:
    """End a Job that was asked to stop, as the reconciler does once nothing runs."""
    with dashboard.database.transaction() as conn:
        conn.execute(
            """
            UPDATE jobs SET state = 'cancelled', ended_running_at = now(), finished_at = now()
            WHERE id = %s
            """,
            [job_id],
        )
