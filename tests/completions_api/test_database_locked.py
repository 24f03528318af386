"""Postgres that answers nobody for seconds: tokens go on, and so does what needs no row."""

import contextlib
import time

import pytest

from app.completions.line import Line
from app.kit.ids import new_uuid
from tests.completions_api.served import api_beside
from tests.completions_api.streams import Reading
from tests.faults.cluster import running_cluster
from tests.faults.stub_engine import DRIPS, HANGS

SECONDS = 5.0  # less than the 10 after which a lock that is waited for is given up


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A cluster with one worker, and its API."""
    with running_cluster(tmp_path_factory.mktemp("locked")) as cluster:
        cluster.start_workers(1)
        with api_beside(cluster) as running:
            yield running


@contextlib.contextmanager
def locked(served):
    """Let nobody read or write a row of a Completion."""
    with served.cluster.database.transaction() as conn:
        conn.execute("LOCK TABLE completions")
        yield


def test_tokens_come_while_claims_wait_for_postgres(served):
    reading = Reading(served, prompt=[DRIPS, 6], max_tokens=50)
    reading.wait_tokens(2)
    line = Line(served.cluster.settings.redis_url)
    with locked(served):
        for _ in range(12):
            line.put("tiny", new_uuid())
        reading.wait(lambda stream: len(stream.chunks) >= 25, SECONDS)
    line.close()
    assert reading.end().is_done


def test_other_routes_answer_while_many_completions_look_for_their_rows(served):
    waiting = [served.begin(prompt=[HANGS, 6]) for _ in range(45)]
    served.cluster.wait(lambda: served.states().count("running") == 45, "all to run")
    with locked(served):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline - 2:
            began = time.monotonic()
            assert served.client.get("/v1/models").status_code == 200
            assert time.monotonic() - began < SECONDS
    served.cluster.workers[0].send(9)
    assert {pending.answer().status_code for pending in waiting} == {503}
