"""An API process that is killed, or stands still, while Completions without a stream run."""

import contextlib
import signal
import threading

import httpx
import pytest
import redis

from app.completions.line import READER_SECONDS
from tests.completions_api.served import api_beside
from tests.completions_api.test_stream_api_dies import api_process
from tests.completions_api.test_stream_faults import reader_key
from tests.faults.cluster import running_cluster
from tests.faults.stub_engine import HANGS
from worker.completions import MISSED_SECONDS

STUB_SECONDS = 20.0  # longer than a reader is missed for, on a busy machine too


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A cluster with a slow worker, and an API that the tests leave alone."""
    with (
        running_cluster(tmp_path_factory.mktemp("plain")) as cluster,
        api_beside(cluster) as running,
    ):
        cluster.start_workers(1, STUB_SECONDS=str(STUB_SECONDS))
        yield running


def posted(served, address, prompt):
    """Post a Completion to another API process in a thread; give where its answer will be."""
    answers = []

    def post():
        with contextlib.suppress(httpx.TransportError):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
            headers = dict(served.client.headers)
            answers.append(
                httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60)
            )

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    return thread, answers


def test_what_a_killed_api_waited_for_is_cancelled_and_released(served):
    before = served.balance()
    with api_process(served.cluster) as (process, address):
        thread, answers = posted(served, address, [HANGS, 6])
        served.wait_state("running")
        process.send_signal(signal.SIGKILL)
        thread.join(10)
    assert not answers
    served.wait_state("cancelled", READER_SECONDS + MISSED_SECONDS + 20)
    assert served.balance() == before

    def in_flight():
        (row,) = served.cluster.rows("SELECT requests_running FROM workers WHERE state = 'ready'")
        return row["requests_running"]

    served.cluster.wait(lambda: in_flight() == 0, "its place in the engine", 30)


def test_what_an_api_waits_for_that_stood_still_for_a_moment_goes_on(served):
    before = served.balance()
    with (
        api_process(served.cluster) as (process, address),
        redis.Redis.from_url(served.cluster.settings.redis_url) as client,
    ):
        thread, answers = posted(served, address, [6, 7])
        served.wait_state("running")
        key = reader_key(served)
        assert client.exists(key)
        process.send_signal(signal.SIGSTOP)
        try:
            served.cluster.wait(lambda: not client.exists(key), "its reader to be missed")
        finally:
            process.send_signal(signal.SIGCONT)
        served.cluster.wait(lambda: client.exists(key), "its reader to be back", 15)
        thread.join(30)
    assert [answer.status_code for answer in answers] == [200]
    assert served.states()[-1] == "succeeded"
    assert served.balance() == (before[0] - 2 - 4, 0)
