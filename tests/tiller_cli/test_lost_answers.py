"""What the client does when an answer is lost on its way from the real API."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from app.jobs.idempotency import IdempotencyKey, claim_key
from tests.fixtures.api import Api
from tests.vectors.test_deletion_race import begin, wait_for_a_lock
from tiller.client import TRIES_MAX, Client
from tiller.errors import ApiError

Send = Callable[[], httpx.Response]
Step = Callable[[Send], httpx.Response]
JOB: dict[str, Any] = {"model": "tiny", "requests": [{"prompt": "hi"}]}


class Way(httpx.BaseTransport):
    """The way to the API; what happens to the first requests on it is told by steps."""

    def __init__(self, there: TestClient) -> None:
        self.there = there
        self.steps: Iterator[Step] = iter(())
        self.keys: list[str | None] = []  # the Idempotency-Key of every try

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("idempotency-key"))
        step = next(self.steps, passes)
        return step(lambda: self.send(request))

    def send(self, request: httpx.Request) -> httpx.Response:
        answer = self.there.request(
            request.method, str(request.url), content=request.read(), headers=dict(request.headers)
        )
        told = [pair for pair in answer.headers.items() if pair[0] == "retry-after"]
        return httpx.Response(answer.status_code, headers=told, content=answer.content)


def passes(send: Send) -> httpx.Response:
    return send()


def is_lost(send: Send) -> httpx.Response:
    assert send().is_success
    msg = "the connection broke"
    raise httpx.ReadError(msg)


def answers(status: int, retry_after: int) -> Step:
    return lambda _send: httpx.Response(status, headers={"retry-after": str(retry_after)})


@pytest.fixture
def way(client: Client) -> Way:
    """The way of the client's requests."""
    there = client._http
    assert isinstance(there, TestClient)
    made = Way(there)
    client._http = httpx.Client(
        transport=made, base_url=str(there.base_url), headers=dict(there.headers)
    )
    return made


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would have waited between its tries."""
    told: list[float] = []
    monkeypatch.setattr("tiller.client.time", SimpleNamespace(sleep=told.append))
    return told


@pytest.fixture
def set_patience(api: Api) -> Callable[[str], None]:
    """Sets how long a request waits for the one that has its key; ten seconds unless told."""

    def told(patience: str) -> None:
        with api.database.transaction() as conn:
            conn.execute(
                f"""
                CREATE OR REPLACE FUNCTION set_patience() RETURNS trigger LANGUAGE plpgsql AS $$
                BEGIN PERFORM set_config('lock_timeout', '{patience}', true); RETURN NULL; END $$
                """
            )

    told("10s")
    with api.database.transaction() as conn:
        conn.execute(
            "CREATE TRIGGER patience BEFORE INSERT ON idempotency_keys "
            "FOR EACH STATEMENT EXECUTE FUNCTION set_patience()"
        )
    return told


def test_a_job_whose_answer_is_lost_is_what_the_next_try_gets(
    client: Client, api: Api, way: Way, pauses: list[float]
) -> None:
    way.steps = iter([is_lost])
    job = client.create_job(**JOB)
    assert [each["id"] for each in client.jobs()] == [job["id"]]
    assert len(way.keys[:2]) == 2
    assert len(set(way.keys[:2])) == 1
    assert pauses == [1.0]


def test_a_try_that_meets_the_first_one_at_work_waits_as_told_and_gets_its_job(
    client: Client,
    api: Api,
    way: Way,
    pauses: list[float],
    set_patience: Callable[[str], None],
) -> None:
    first: list[Future[httpx.Response]] = []

    def breaks_while_it_is_worked_on(send: Send) -> httpx.Response:
        first.append(begin(send))
        wait_for_a_lock(api.database)
        set_patience("50ms")
        msg = "the connection broke"
        raise httpx.ReadError(msg)

    def comes_when_the_first_is_done(send: Send) -> httpx.Response:
        held.rollback()
        assert first[0].result(20).status_code == 202
        return send()

    way.steps = iter([breaks_while_it_is_worked_on, passes, comes_when_the_first_is_done])
    with api.database.transaction() as held:
        held.execute("SELECT FROM accounts WHERE id = %s FOR UPDATE", (api.account_id,))
        job = client.create_job(**JOB)
    assert pauses == [1.0, 2.0]
    assert len(way.keys) == 3
    assert len(set(way.keys)) == 1
    assert [each["id"] for each in client.jobs()] == [job["id"]]
    assert api.numbers()["held"] == job["usage"]["held"]


def test_a_key_that_stays_taken_is_told_after_the_last_try_and_can_be_sent_again(
    client: Client,
    api: Api,
    way: Way,
    pauses: list[float],
    set_patience: Callable[[str], None],
) -> None:
    set_patience("50ms")
    with api.database.transaction() as held:
        claim_key(held, api.account_id, IdempotencyKey("mine", bytes(32)))
        with pytest.raises(ApiError, match="still being worked on") as refused:
            client.create_job(**JOB, idempotency_key="mine")
        held.rollback()
    assert (refused.value.status, refused.value.code) == (409, "idempotency_in_progress")
    assert way.keys == ["mine"] * TRIES_MAX
    assert pauses == [2.0] * (TRIES_MAX - 1)
    job = client.create_job(**JOB, idempotency_key="mine")
    assert client.create_job(**JOB, idempotency_key="mine")["id"] == job["id"]
    assert api.numbers()["jobs"] == 1


def test_a_key_of_ones_own_names_one_body(client: Client, api: Api) -> None:
    client.create_job(**JOB, idempotency_key="mine")
    with pytest.raises(ApiError) as refused:
        client.create_job(**JOB, name="another", idempotency_key="mine")
    assert (refused.value.status, refused.value.code) == (422, "idempotency_key_reused")
    assert client.create_job(**JOB)["id"] != client.create_job(**JOB)["id"]
    assert api.numbers()["jobs"] == 3


@pytest.mark.parametrize("key", ["", "schlüssel", "one\nmore: line"])
def test_a_key_that_no_header_can_hold_is_refused_before_it_is_sent(
    client: Client, way: Way, key: str
) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        client.create_job(**JOB, idempotency_key=key)
    assert way.keys == []


def test_a_deletion_whose_answer_is_lost_is_done(
    client: Client, way: Way, pauses: list[float]
) -> None:
    stored = client.create_vector([1.0] * 8)
    way.steps = iter([is_lost])
    client.delete_vector(stored["id"])
    assert pauses == [1.0]
    assert list(client.vectors()) == []


@pytest.mark.parametrize("status", [409, 429])
def test_a_deletion_that_was_put_off_is_sent_again_and_finds_what_there_is(
    client: Client, way: Way, pauses: list[float], status: int
) -> None:
    stored = client.create_vector([1.0] * 8)
    way.steps = iter([answers(status, 3)])
    client.delete_vector(stored["id"])
    assert list(client.vectors()) == []
    way.steps = iter([answers(status, 3)])
    with pytest.raises(ApiError) as refused:
        client.delete_vector(stored["id"])
    assert (refused.value.status, refused.value.code) == (404, "not_found")
    assert pauses == [3.0, 3.0]


def test_a_vector_that_is_in_use_or_unknown_is_refused_at_once(
    client: Client, way: Way, pauses: list[float]
) -> None:
    stored = client.create_vector([1.0] * 8)
    steer = {"op": "add", "layers": [1], "vector": stored["id"]}
    client.create_job(model="tiny", requests=[{"prompt": "hi", "interventions": [steer]}])
    for name, told in ((stored["id"], (409, "vector_in_use")), ("sv_none", (404, "not_found"))):
        before = len(way.keys)
        with pytest.raises(ApiError) as refused:
            client.delete_vector(name)
        assert (refused.value.status, refused.value.code) == told
        assert len(way.keys) == before + 1
    assert pauses == []
