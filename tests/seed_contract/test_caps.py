"""Caps: a body is refused before it is read whole, a capture before anything runs."""

import json
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from app.kit.db import Database
from app.main import create_app
from app.settings import Limits
from tests.fixtures.api import UNHURRIED, a_key, settings_for
from tests.patching.serving import serving
from tests.seed_contract.refused import PLAIN
from tests.seed_contract.unchanged import everything

BODY_MAX = 256 * 1024
CAPTURE_MAX = 127
CHUNK = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
# What may be on its way when the answer is written: buffers of both ends of the connection.
IN_FLIGHT_MAX = 16 * 1024 * 1024
SECONDS_MAX = 20.0


class Small:
    """An API with small caps on a port, its key, and what stands behind it."""

    def __init__(self, address: str, key: str, database: Database) -> None:
        self.address = address
        self.key = key
        self.database = database

    def begin(self, *lines: str, key: str | None = None) -> socket.socket:
        """Open a connection and send the head of a Completion."""
        url = httpx.URL(self.address)
        connection = socket.create_connection((url.host, url.port), timeout=SECONDS_MAX)
        head = [
            "POST /v1/completions HTTP/1.1",
            f"host: {url.host}",
            f"authorization: Bearer {key or self.key}",
            "content-type: application/json",
            *lines,
        ]
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        return connection


@pytest.fixture
def small(tmp_path: Path, database: Database, database_url: str, redis_url: str) -> Iterator[Small]:
    """An API with small caps; nothing may have changed in it afterwards."""
    limits = Limits(body_bytes=BODY_MAX, capture_bytes_completion=CAPTURE_MAX, **UNHURRIED)
    settings = settings_for(tmp_path, database_url=database_url, redis_url=redis_url, limits=limits)
    _, key = a_key(database)
    with serving(create_app(settings)) as address:
        before = everything(database)
        yield Small(address, key, database)
        assert everything(database) == before


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], dict[str, object]]:
    """Read one answer: status, headers, and the JSON that came with it."""
    file = connection.makefile("rb")
    status = int(file.readline().split()[1])
    headers = {}
    while (line := file.readline().strip()) != b"":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers, json.loads(file.read(int(headers["content-length"])))


def check_too_large(connection: socket.socket, actual: str) -> None:
    status, headers, content = read_answer(connection)
    assert status == 413
    error = content["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (None, "request_too_large")
    assert actual in error["message"]
    assert f"at most {BODY_MAX}" in error["message"]
    assert content["request_id"] == headers["x-request-id"]


def test_a_stated_length_over_the_cap_is_refused_before_a_byte_of_it(small: Small) -> None:
    with small.begin(f"content-length: {BODY_MAX + 1}") as connection:
        check_too_large(connection, str(BODY_MAX + 1))


def test_a_stream_without_end_is_refused_when_it_passes_the_cap(small: Small) -> None:
    sent = 0
    with small.begin("transfer-encoding: chunked") as connection:
        while not select.select([connection], [], [], 0)[0]:
            assert sent < BODY_MAX + IN_FLIGHT_MAX, "the service reads on and on"
            if select.select([], [connection], [], 0.01)[1]:
                connection.sendall(CHUNK)
                sent += 0x8000
        check_too_large(connection, f"more than {BODY_MAX}")
    assert sent > BODY_MAX


def test_a_stream_that_stays_under_the_cap_and_stops_does_not_hold_others_up(small: Small) -> None:
    with small.begin("transfer-encoding: chunked") as slow:
        slow.sendall(CHUNK)
        answers = []
        asking = [
            threading.Thread(target=lambda: answers.append(httpx.get(f"{small.address}/v1/models")))
            for _ in range(4)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(SECONDS_MAX)
    assert [answer.status_code for answer in answers] == [401] * 4, "no key was sent"


def test_the_sdk_tells_the_cap(small: Small) -> None:
    with OpenAI(base_url=f"{small.address}/v1", api_key=small.key, max_retries=0) as sdk:
        with pytest.raises(openai.APIStatusError) as refused:
            sdk.completions.create(model="tiny", prompt="x" * BODY_MAX)
        assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
        assert f"at most {BODY_MAX}" in str(refused.value)
        with pytest.raises(openai.BadRequestError) as too_much:
            sdk.completions.create(
                model="tiny", **PLAIN, extra_body={"output_residual_stream": [1]}
            )
    message = too_much.value.body["message"]
    assert too_much.value.param == "output_residual_stream"
    for part in ("128 bytes", "4 positions", "at most 127", "fewer layers", "max_tokens"):
        assert part in message, message


def test_every_cap_is_told_by_the_limits_route(small: Small) -> None:
    headers = {"authorization": f"Bearer {small.key}"}
    answer = httpx.get(f"{small.address}/v1/limits", headers=headers).json()
    limits = {limit["id"]: limit["value"] for limit in answer["data"]}
    told = {
        "body_bytes": BODY_MAX,
        "capture_bytes_completion": CAPTURE_MAX,
        "vectors_per_request": 8,
        "vector_numbers": 2_097_152,
        "span_positions": 4096,
    }
    assert told.items() <= limits.items()
