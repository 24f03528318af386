"""An API process that is killed in the middle of a stream."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from app.completions.line import READER_SECONDS
from tests.completions_api.served import api_beside
from tests.faults.cluster import Cluster, running_cluster
from tests.faults.stub_engine import STALLS, TOKENS_BEFORE
from tests.fixtures.api import PEPPER
from tests.rules.source_tree import ROOT
from worker.completions import MISSED_SECONDS


@contextlib.contextmanager
def api_process(cluster: Cluster) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """Serve the API in a process of its own, and give it and its address."""
    settings = cluster.settings
    environment = {
        **os.environ,
        "TILLER_DATABASE_URL": settings.database_url,
        "TILLER_REDIS_URL": settings.redis_url,
        "TILLER_OBJECT_STORE": settings.object_store,
        "TILLER_MODELS_FILE": str(settings.models_file),
        "TILLER_KEY_PEPPER": PEPPER,
    }
    with socket.create_server(("127.0.0.1", 0)) as listening:
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "serve", "--fd", str(listening.fileno())],
            cwd=ROOT,
            env=environment,
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
        )
        try:
            yield process, f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            process.kill()
            process.wait()


def test_its_streams_are_aborted_and_charged_what_was_made(tmp_path):
    with running_cluster(tmp_path) as cluster, api_beside(cluster) as served:
        cluster.start_workers(1)
        before = served.balance()
        body = {"model": "tiny", "prompt": [STALLS, 6], "max_tokens": 30, "stream": True}
        with (
            api_process(cluster) as (process, address),
            httpx.Client(headers=served.client.headers, timeout=60) as client,
            client.stream("POST", f"{address}/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            assert "choices" in next(lines)
            process.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)
        served.wait_state("cancelled", READER_SECONDS + MISSED_SECONDS + 2)
        assert served.balance() == (before[0] - 2 - TOKENS_BEFORE, 0)

        def in_flight() -> int:
            (row,) = cluster.rows("SELECT requests_running FROM workers WHERE state = 'ready'")
            return row["requests_running"]

        cluster.wait(lambda: in_flight() == 0, "its place in the engine", 2)
        assert served.complete().status_code == 200
