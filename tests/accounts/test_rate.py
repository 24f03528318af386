"""Rates are counted by key before a body is looked at; without Redis everybody passes."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from app.accounts.rate import Rate, RateLimits, Standing
from app.kit.db import Database
from app.kit.ids import new_uuid
from app.main import create_app
from app.settings import Limits
from app.stack.redis import EmbeddedRedis
from tests.fixtures.api import a_key, settings_for
from tests.stack.waiting import wait_for

FEW = Limits(completions_per_minute=2, creates_per_minute=3, requests_per_minute=4)
TOKENIZE = {"model": "tiny", "prompt": "ab"}
JOB = {"model": "tiny", "requests": [{"prompt": "hi"}]}


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A Redis that a test may kill or freeze."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = EmbeddedRedis(folder)
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def an_api(folder: Path, database_url: str, redis_url: str, **headers: str) -> Iterator[TestClient]:
    folder.mkdir()
    settings = settings_for(folder, database_url=database_url, redis_url=redis_url, limits=FEW)
    app = create_app(settings)
    with TestClient(app, headers=headers, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def client(
    tmp_path: Path, database: Database, database_url: str, redis_url: str
) -> Iterator[TestClient]:
    """An API whose keys may ask little."""
    _, key = a_key(database)
    bearer = f"Bearer {key}"
    with an_api(tmp_path / "api", database_url, redis_url, authorization=bearer) as client:
        yield client


def left(answer: httpx.Response) -> str:
    return answer.headers["x-ratelimit-remaining-requests"]


def test_every_answer_of_a_limited_route_says_what_is_left(client):
    first = client.post("/v1/tokenize", json=TOKENIZE)
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "4"
    assert left(first) == "3"
    assert first.headers["x-ratelimit-reset-requests"] in ("1m0s", "60s")
    refused = client.post("/v1/tokenize", json={"model": "tiny"})
    assert (refused.status_code, left(refused)) == (400, "2")
    assert "x-ratelimit-limit-requests" not in client.get("/v1/models").headers


def test_one_too_many_is_429_and_says_when_to_come_back(client):
    for _ in range(4):
        assert client.post("/v1/tokenize", json=TOKENIZE).status_code == 200
    answer = client.post("/v1/tokenize", content=b"not even JSON")
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert left(answer) == "0"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    for part in ("4 other POST requests", "requests_per_minute", "again in"):
        assert part in error["message"]
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_kinds_of_requests_and_keys_are_counted_apart(client, database):
    for _ in range(3):
        assert client.post("/v1/jobs", json=JOB).status_code == 202
    assert client.post("/v1/jobs", json=JOB).status_code == 429
    vector = {"vector": [1.0] * 8}
    assert client.post("/v1/steering_vectors", json=vector).status_code == 429
    assert client.post("/v1/tokenize", json=TOKENIZE).status_code == 200
    _, other = a_key(database)
    headers = {"authorization": f"Bearer {other}"}
    assert client.post("/v1/jobs", json=JOB, headers=headers).status_code == 202


def test_completions_are_refused_before_a_hold(client, database):
    body = {"model": "tiny", "prompt": [2, 3], "max_tokens": 2}
    codes = [client.post("/v1/completions", json=body) for _ in range(3)]
    assert [answer.status_code for answer in codes] == [503, 503, 429], "there is no worker"
    assert [left(answer) for answer in codes] == ["1", "0", "0"]
    with database.transaction() as conn:
        assert conn.execute("SELECT count(*) AS n FROM holds").fetchone() == {"n": 0}


def test_who_has_no_key_is_not_counted(client):
    headers = {"authorization": "Bearer nobody"}
    answer = client.post("/v1/tokenize", json=TOKENIZE, headers=headers)
    assert answer.status_code == 401
    assert "x-ratelimit-limit-requests" not in answer.headers


def test_two_processes_share_one_budget(tmp_path, database, database_url, redis_url):
    _, key = a_key(database)
    bearer = f"Bearer {key}"
    with (
        an_api(tmp_path / "one", database_url, redis_url, authorization=bearer) as one,
        an_api(tmp_path / "two", database_url, redis_url, authorization=bearer) as two,
    ):
        answers = [each.post("/v1/tokenize", json=TOKENIZE) for each in (one, two) * 3]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2


def test_limits_tell_what_is_in_use(client):
    client.post("/v1/tokenize", json=TOKENIZE)
    found = {item["id"]: item for item in client.get("/v1/limits").json()["data"]}
    assert (found["requests_per_minute"]["value"], found["requests_per_minute"]["in_use"]) == (4, 1)
    assert found["creates_per_minute"]["in_use"] == 0
    assert found["completions_waiting_key"]["in_use"] == 0


def test_a_dead_redis_lets_everybody_pass(tmp_path, database, database_url, own_redis):
    _, key = a_key(database)
    bearer = f"Bearer {key}"
    with an_api(tmp_path / "api", database_url, own_redis.url, authorization=bearer) as client:
        assert left(client.post("/v1/tokenize", json=TOKENIZE)) == "3"
        assert own_redis.process is not None
        own_redis.process.kill()
        own_redis.process.wait()
        for _ in range(8):
            answer = client.post("/v1/tokenize", json=TOKENIZE)
            assert answer.status_code == 200
            assert "x-ratelimit-remaining-requests" not in answer.headers


def test_a_frozen_redis_delays_one_request_and_is_used_again(own_redis, caplog):
    rates = RateLimits(own_redis.url, FEW, left_alone_seconds=6)
    key = new_uuid()
    assert rates.count(Rate.requests, key) is not None
    process = own_redis.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    try:
        assert [rates.count(Rate.requests, key) for _ in range(50)] == [None] * 50
        assert time.monotonic() - started < 5.9, "it was asked once"
    finally:
        process.send_signal(signal.SIGCONT)
    assert [record.message for record in caplog.records] == ["rates are not limited: Redis is away"]
    standing = wait_for(lambda: rates.count(Rate.requests, key), "Redis to be used again")
    assert not standing.is_over
    rates.close()


def test_a_window_moves_on(redis_url):
    rates = RateLimits(redis_url, Limits(requests_per_minute=2))
    key = new_uuid()
    seen = [rates.count(Rate.requests, key) for _ in range(4)]
    assert [standing is not None and standing.is_over for standing in seen] == [
        *(False, False, True, True),
    ]
    last = seen[-1]
    assert last is not None
    assert 0 < last.reset_seconds <= 60
    rates.close()


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1s"), (59.9, "1m0s"), (360, "6m0s")])
def test_durations_are_written_as_openai_does(seconds, text):
    assert Standing(1, 0, seconds).headers["x-ratelimit-reset-requests"] == text
