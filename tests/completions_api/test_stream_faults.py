"""Streams that do not go well, with the stub engine: what the client sees, and what it pays."""

import contextlib
import signal
import time

import httpx
import pytest
import redis

from app.completions.line import READER_SECONDS, Reader
from app.completions.records import store_completion
from app.kit.ids import new_uuid
from tests.completions_api.served import api_beside
from tests.completions_api.streams import Reading, Stream, opened, streamed
from tests.faults.cluster import running_cluster
from tests.faults.stub_engine import BREAKS, DIES, DRIPS, FAILS, HANGS, STALLS, TOKENS_BEFORE
from tests.fixtures.builders import a_spec
from tests.fixtures.documented import Described
from worker.failpoints import KILLED

PROMPT = [6, 7, 8]
LEFT_SECONDS = 2.0  # within which the place of a client that left is free


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A cluster with one worker, and its API."""
    with running_cluster(tmp_path_factory.mktemp("streams")) as cluster:
        cluster.start_workers(1)
        with api_beside(cluster) as running:
            yield running


def charged(served):
    (row,) = served.cluster.rows("SELECT tokens_charged FROM completions ORDER BY id DESC LIMIT 1")
    return row["tokens_charged"]


def in_flight(served):
    (row,) = served.cluster.rows("SELECT requests_running FROM workers WHERE state = 'ready'")
    return row["requests_running"]


def test_a_stream_is_the_plain_answer_in_pieces(served):
    plain = served.complete(return_token_ids=True).json()
    before = served.balance()
    stream = streamed(
        served,
        described=Described(served.app),
        return_token_ids=True,
        stream_options={"include_usage": True},
    )
    assert stream.status == 200
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["x-request-id"].startswith("req_")
    assert stream.is_done
    assert stream.joined() == {name: plain[name] for name in ("model", "choices", "usage")}
    assert {chunk["id"] for chunk in stream.chunks} == {stream.chunks[0]["id"]}
    assert [chunk["usage"] for chunk in stream.chunks[:-1]] == [None] * (len(stream.chunks) - 1)
    assert served.balance() == (before[0] - 3 - 4, 0)


def test_without_include_usage_no_chunk_tells_of_it(served):
    stream = streamed(served)
    assert stream.is_done
    assert all(chunk["choices"] and "usage" not in chunk for chunk in stream.chunks)


def test_what_fails_before_the_first_token_is_no_stream(served):
    before = served.balance()
    stream = streamed(served, prompt=[FAILS, 6])
    assert (stream.status, stream.error["error"]["code"]) == (500, "steering_failed")
    assert stream.headers["content-type"] == "application/json"
    assert stream.error["request_id"] == stream.headers["x-request-id"]
    assert served.balance() == before


def test_what_fails_later_ends_with_an_error_and_is_released(served):
    before = served.balance()
    stream = streamed(served, described=Described(served.app), prompt=[BREAKS, 6])
    assert stream.status == 200
    assert len(stream.text().split()) == TOKENS_BEFORE
    assert stream.error["error"]["code"] == "steering_failed"
    assert stream.error["request_id"] == stream.headers["x-request-id"]
    assert not stream.is_done
    assert (served.balance(), served.states()[-1]) == (before, "errored")


@contextlib.contextmanager
def left(served, **fields):
    """Begin a stream, do what the block says, and break the connection off."""
    with opened(served, Stream(), **fields) as answer:
        yield answer.iter_lines()


def wait_left(served):
    began = time.monotonic()
    served.wait_state("cancelled", LEFT_SECONDS)
    served.cluster.wait(
        lambda: in_flight(served) == 0,
        "its place in the engine",
        # The worker's row is written at heartbeats.
        LEFT_SECONDS + began - time.monotonic() + 0.5,
    )


def test_a_client_that_leaves_pays_what_was_made_and_frees_its_place(served):
    before = served.balance()
    with left(served, prompt=[STALLS, 6], max_tokens=30) as lines:
        while "choices" not in next(lines):
            pass
        served.cluster.wait(lambda: in_flight(served) == 1, "the engine to have it")
    wait_left(served)
    assert charged(served) == 2 + TOKENS_BEFORE
    assert served.balance() == (before[0] - 2 - TOKENS_BEFORE, 0)


def test_a_client_that_leaves_while_tokens_come_pays_for_these(served):
    before, read = served.balance(), 0
    with left(served, prompt=[DRIPS, 6], max_tokens=60) as lines:
        while read < 5:
            read += "choices" in next(lines)
    wait_left(served)
    assert 2 + read <= charged(served) <= 2 + read + 25, "not the 60 that it might have made"
    assert served.balance() == (before[0] - charged(served), 0)


def test_a_client_that_leaves_before_the_first_token_pays_for_the_prompt(served):
    before = served.balance()
    body = {"model": "tiny", "prompt": [HANGS, 6], "max_tokens": 4, "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        served.client.post("/v1/completions", json=body, timeout=1.0)
    wait_left(served)
    assert served.balance() == (before[0] - 2, 0)


def test_a_client_that_leaves_before_a_worker_took_it_pays_nothing(served):
    before = served.balance()
    (worker,) = served.cluster.workers
    worker.send(signal.SIGSTOP)
    try:
        with pytest.raises(httpx.ReadTimeout):
            streamed_with_timeout(served)
        served.wait_state("cancelled", LEFT_SECONDS)
        assert served.balance() == before
    finally:
        worker.send(signal.SIGCONT)
    served.cluster.wait(lambda: served.complete().status_code == 200, "a Completion again")


def streamed_with_timeout(served):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "stream": True}
    served.client.post("/v1/completions", json=body, timeout=1.0)


def reader_key(served):
    (row,) = served.cluster.rows("SELECT id FROM completions ORDER BY id DESC LIMIT 1")
    return f"tiller:completions:reader:{row['id'].hex}"


def test_what_the_api_failed_is_not_charged(served):
    before = served.balance()
    reading = Reading(served, prompt=[STALLS, 6])
    reading.wait_tokens(1)
    key = reader_key(served)
    with redis.Redis.from_url(served.cluster.settings.redis_url) as client:

        def fail():
            client.set(key, Reader.failed.value, ex=60)  # this feed goes on saying that it reads
            return served.states()[-1] == "errored"

        served.cluster.wait(fail, "its worker to see it", LEFT_SECONDS)
    stream = reading.end()
    assert stream.error["error"]["code"] == "broker_unavailable"
    assert served.balance() == before


def test_what_the_api_failed_in_the_last_moment_is_not_charged(served):
    builders, settings = served.cluster.builders, served.cluster.settings
    account, completion_id = builders.an_account(balance=100), new_uuid()
    with served.cluster.database.transaction() as conn:
        store_completion(
            conn, account, completion_id, model="tiny", specs=[a_spec()], seconds=60, stream=True
        )
    with redis.Redis.from_url(settings.redis_url) as client:
        client.set(reader_key(served), Reader.failed.value, ex=60)
        client.rpush("tiller:completions:tiny", completion_id.bytes)
    served.wait_state("errored")
    (row,) = served.cluster.rows(
        """
        SELECT error_code, balance, held FROM completions JOIN accounts ON accounts.id = account_id
        WHERE completions.id = %(id)s
        """,
        id=completion_id,
    )
    assert row == {"error_code": "broker_unavailable", "balance": 100, "held": 0}


def test_a_redis_that_forgot_a_reader_ends_no_stream(served):
    said = READER_SECONDS * 1000 - 200
    with (
        redis.Redis.from_url(served.cluster.settings.redis_url) as client,
        left(served, prompt=[STALLS, 6], max_tokens=30) as lines,
    ):
        while "choices" not in next(lines):
            pass
        key = reader_key(served)
        served.cluster.wait(lambda: client.pttl(key) > said, "its reader to say so", 3)
        assert client.delete(key) == 1  # for as long as can be: until it says so again
        served.cluster.wait(lambda: client.exists(key), "its reader to be back", 3)
        assert served.states()[-1] == "running"
    wait_left(served)


def test_a_client_that_reads_late_gets_everything_and_holds_nobody_up(served):
    stream = Stream()
    with opened(served, stream, max_tokens=60, stop=["no such text"]) as answer:
        served.wait_state("succeeded")
        served.cluster.wait(lambda: in_flight(served) == 0, "its place in the engine")
        for line in answer.iter_lines():
            stream.take(line)
    assert stream.is_done
    plain = served.complete(max_tokens=60, stop=["no such text"]).json()
    assert stream.text() == plain["choices"][0]["text"]


def test_a_deadline_in_the_middle_ends_the_stream_with_an_error(served):
    before = served.balance()
    reading = Reading(served, prompt=[STALLS, 6])
    reading.wait_tokens(1)
    with served.cluster.database.transaction() as conn:
        conn.execute(
            "UPDATE completions SET deadline = clock_timestamp() WHERE finished_at IS NULL"
        )
    stream = reading.end(5)
    assert stream.error["error"]["code"] == "deadline_exceeded"
    assert not stream.is_done
    assert (served.balance(), served.states()[-1]) == (before, "expired")
    served.cluster.wait(lambda: in_flight(served) == 0, "its place in the engine", 5)


def test_redis_killed_in_the_middle_ends_the_stream_with_an_error(served):
    before = served.balance()
    reading = Reading(served, prompt=[DRIPS, 6], max_tokens=60)
    reading.wait_tokens(2)
    served.cluster.kill_redis()
    try:
        stream = reading.end(15)
        refused = streamed(served)
        assert (refused.status, refused.error["error"]["code"]) == (503, "broker_unavailable")
        assert "retry-after" in refused.headers
    finally:
        served.cluster.redis.start()
    assert stream.error["error"]["code"] == "broker_unavailable"
    assert not stream.is_done
    assert (served.balance(), served.states()[-2:]) == (before, ["errored", "errored"])
    served.cluster.wait(lambda: served.complete().status_code == 200, "a Completion again")


def test_a_worker_killed_in_the_middle_ends_the_stream_with_an_error(served):
    before = served.balance()
    reading = Reading(served, prompt=[DRIPS, 6], max_tokens=60)
    reading.wait_tokens(2)
    served.cluster.workers[0].send(signal.SIGKILL)
    stream = reading.end(20)
    assert stream.error["error"]["code"] == "worker_lost"
    assert not stream.is_done
    assert (served.balance(), served.states()[-1]) == (before, "errored")
    served.cluster.wait_ready()


def test_an_engine_that_dies_is_503_and_no_stream(served):
    before = served.balance()
    stream = streamed(served, prompt=[DIES, 6])
    assert stream.status == 503
    assert served.balance() == before
    served.cluster.wait(lambda: served.cluster.workers[0].exits[1:], "the worker to start anew")
    served.cluster.wait_ready()


def test_a_worker_told_to_stop_ends_its_streams_with_an_error(served):
    before = served.balance()
    reading = Reading(served, prompt=[STALLS, 6])
    reading.wait_tokens(1)
    served.cluster.workers[0].send(signal.SIGTERM)
    stream = reading.end()
    assert stream.error["error"]["code"] == "worker_stopped"
    assert not stream.is_done
    assert served.balance() == before


def test_all_tokens_without_a_charge_are_not_done(served):
    before = served.balance()
    served.cluster.workers.pop().end()
    worker = served.cluster.start_worker(failpoint="completion_answered")
    served.cluster.wait_ready()
    pid = worker.pid
    reading = Reading(served)
    served.cluster.wait(lambda: worker.exits == [KILLED], "the worker to die")
    with served.cluster.database.transaction() as conn:
        conn.execute(
            "UPDATE workers SET heartbeat_at = heartbeat_at - interval '1 minute' WHERE pid = %s",
            [pid],
        )
    stream = reading.end()
    assert len(stream.text().split()) == 4
    assert stream.error["error"]["code"] == "worker_lost"
    assert not stream.is_done
    assert (served.balance(), served.states()[-1]) == (before, "errored")
