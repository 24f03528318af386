"""Bodies that trickle in: how long they may take, and how many places they can hold."""

import contextlib
import json
import socket

import httpx
import pytest

from app.accounts.accounts import USER_SCOPES, create_key
from app.settings import Limits
from tests.completions_api.served import api_beside
from tests.faults.cluster import running_cluster
from tests.fixtures.api import PEPPER, a_key

BODY_SECONDS = 2
ACCOUNT_PLACES = 4
KEY_PLACES = 2
LIMITS = Limits(
    body_seconds=BODY_SECONDS,
    completions_waiting_key=KEY_PLACES,
    completions_waiting_account=ACCOUNT_PLACES,
    completions_waiting=2 * ACCOUNT_PLACES,
)
BODY = json.dumps({"model": "tiny", "prompt": [6, 7], "max_tokens": 2}).encode()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The API with a short time for bodies; its only worker answers at once."""
    folder = tmp_path_factory.mktemp("slow")
    with (
        running_cluster(folder, settings={"limits": LIMITS}) as cluster,
        api_beside(cluster) as running,
    ):
        cluster.start_workers(1)
        yield running


@contextlib.contextmanager
def trickling(served, key):
    """Send the head of a request and a part of its body."""
    url = httpx.URL(str(served.client.base_url))
    with socket.create_connection((url.host, url.port), timeout=30) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\nauthorization: Bearer {key}\r\n"
            f"content-length: {len(BODY)}\r\n\r\n".encode()
        )
        connection.sendall(BODY[:10])
        yield connection


def everything(connection):
    """Read until the other side closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def own_key(served):
    return served.client.headers["authorization"].removeprefix("Bearer ")


def places(served):
    return served.app.state.places.of_account(served.account_id)


def test_a_body_that_does_not_arrive_in_time_is_408_and_its_place_is_free(served):
    before = served.balance()
    with trickling(served, own_key(served)) as connection:
        served.cluster.wait(lambda: places(served) == 1, "it to have a place")
        answer = everything(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("request_timeout", "invalid_request_error")
    assert f"within {BODY_SECONDS} s" in error["message"]
    assert places(served) == 0
    assert served.balance() == before


def test_a_body_that_arrives_in_parts_within_its_time_is_answered(served):
    with trickling(served, own_key(served)) as connection:
        served.cluster.wait(lambda: places(served) == 1, "it to have a place")
        connection.sendall(BODY[10:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_all_keys_of_one_account_cannot_take_all_places(served):
    with served.cluster.database.transaction() as conn:
        keys = [
            create_key(conn, served.account_id, PEPPER, name="a key", scopes=USER_SCOPES).secret
            for _ in range(3)
        ]
    _, other = a_key(served.cluster.database)
    with contextlib.ExitStack() as stack:
        for key in keys[:2]:
            for _ in range(KEY_PLACES):
                stack.enter_context(trickling(served, key))
        served.cluster.wait(lambda: places(served) == ACCOUNT_PLACES, "all to have a place")
        mine = post(served, keys[2])
        theirs = post(served, other)
    assert (mine.status_code, mine.json()["error"]["code"]) == (429, "queue_full")
    assert "completions_waiting_account" in mine.json()["error"]["message"]
    assert theirs.status_code == 200
    served.cluster.wait(lambda: places(served) == 0, "their places to be free")


def post(served, key):
    return served.client.post(
        "/v1/completions", content=BODY, headers={"authorization": f"Bearer {key}"}
    )


def test_limits_tell_of_the_account(served):
    found = {item["id"]: item for item in served.client.get("/v1/limits").json()["data"]}
    assert found["completions_waiting_account"]["value"] == ACCOUNT_PLACES
    assert found["completions_waiting_account"]["in_use"] == 0
    assert found["body_seconds"]["value"] == BODY_SECONDS
