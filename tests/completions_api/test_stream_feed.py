"""What the API makes of a stream in Redis: order, loss and the end, which Postgres decides."""

import asyncio

import orjson
import pytest
from starlette.requests import Request

from app.completions.intake import PreparedCompletion
from app.completions.line import (
    ANSWER_SECONDS,
    READ_ENTRIES,
    READER_SECONDS,
    Line,
    TokenEntry,
)
from app.completions.records import claim_completion, store_completion, succeed_completion
from app.completions.stream import TokenFeed
from app.completions.waiting import ClientLeftError, Desk
from app.errors import ApiError
from tests.checker import check_everything
from tests.fixtures.builders import a_spec

BALANCE = 1000
HELD = 9  # of a_spec: 5 prompt tokens and 4 to generate
ENTRIES_MAX = 200


class Stage:
    """A stored and claimed stream; what a worker would do is done by hand."""

    def __init__(self, database, builders, redis_url):
        self.database = database
        self.redis_url = redis_url
        self.line = Line(redis_url)
        self.account = builders.an_account(balance=BALANCE)
        self.worker = builders.a_worker()
        self.prepared = PreparedCompletion(
            model=None,  # a feed does not look at it
            specs=(a_spec(),),
            vectors={},
            return_token_ids=False,
            stream=True,
            include_usage=False,
        )
        self.id = self.prepared.id
        with database.transaction() as conn:
            store_completion(
                conn,
                self.account,
                self.id,
                model="tiny",
                specs=[a_spec()],
                seconds=60,
                stream=True,
            )
        with database.transaction() as conn:
            claimed = claim_completion(conn, self.id, self.worker.worker_id, model="tiny")
        assert claimed is not None
        assert claimed.stream

    def put(self, *numbers, tokens=1):
        piece = {"place": 0, "index": 0, "text": "a", "token_ids": [5] * tokens}
        self.line.put_tokens(
            [TokenEntry(self.id, number, orjson.dumps([piece]), ENTRIES_MAX) for number in numbers]
        )

    def succeed(self, *, tokens):
        self.line.put_answer(self.id, orjson.dumps([{"completion_tokens": tokens, "captures": {}}]))
        with self.database.transaction() as conn:
            assert succeed_completion(conn, self.id, self.worker.worker_id, tokens)

    def read(self):
        """Read to the end; give how many pieces came in each turn, and the last part."""

        async def everything():
            desk = Desk(self.database, self.redis_url)
            feed = TokenFeed(desk, self.prepared)
            try:
                turns = []
                while (pieces := await feed.poll()) is not None:
                    turns.append(len(pieces))
                return turns, await feed.last()
            finally:
                await feed.close()
                await desk.close()

        return asyncio.run(everything())

    def numbers(self):
        with self.database.transaction() as conn:
            row = conn.execute(
                "SELECT balance, held FROM accounts WHERE id = %s", [self.account]
            ).fetchone()
        return row["balance"], row["held"]

    def state(self):
        with self.database.transaction() as conn:
            return conn.execute(
                "SELECT state FROM completions WHERE id = %s", [self.id]
            ).fetchone()["state"]


@pytest.fixture
def stage(database, builders, redis_url):
    """A stream that a worker has claimed; everything is checked at the end."""
    stage = Stage(database, builders, redis_url)
    yield stage
    stage.line.close()
    check_everything(database)


def test_tokens_that_do_not_add_up_are_an_error(stage):
    stage.put(*range(READ_ENTRIES + 3))
    stage.succeed(tokens=4)
    with pytest.raises(ApiError) as raised:
        stage.read()  # 67 tokens are not the 4 that count
    assert raised.value.code == "broker_unavailable"
    assert stage.numbers() == (BALANCE - 9, 0)


def test_what_redis_still_holds_is_read_before_the_end_counts(stage):
    stage.put(0, 1, 2, 3)
    stage.line.end_tokens(stage.id)
    stage.succeed(tokens=4)
    turns, ends = stage.read()
    assert sum(turns) == 4
    assert ends == [{"completion_tokens": 4, "captures": {}}]


def test_an_end_that_redis_tells_and_postgres_does_not_is_no_end(stage):
    stage.put(0, 1)
    stage.line.end_tokens(stage.id)

    async def some():
        desk = Desk(stage.database, stage.redis_url)
        feed = TokenFeed(desk, stage.prepared)
        first = await feed.poll()
        later = [await feed.poll() for _ in range(3)]
        await feed.close()
        await desk.close()
        return first, later

    first, later = asyncio.run(some())
    assert (len(first), later) == (2, [[], [], []])
    assert stage.state() == "running"
    stage.succeed(tokens=2)


def test_a_missing_entry_is_an_error_and_releases_the_hold(stage):
    stage.put(0, 2)
    with pytest.raises(ApiError) as raised:
        stage.read()
    assert raised.value.code == "broker_unavailable"
    assert stage.state() == "errored"
    assert stage.numbers() == (BALANCE, 0)


def test_an_answer_that_got_lost_is_an_error(stage):
    stage.put(0)
    stage.succeed(tokens=1)
    assert stage.line.read_answer(stage.id) is not None
    with pytest.raises(ApiError) as raised:
        stage.read()
    assert raised.value.code == "broker_unavailable"


def test_a_stream_keeps_no_more_entries_than_it_may_have_and_ends_by_itself(stage):
    stage.put(*range(ENTRIES_MAX + 5))
    client = stage.line._redis  # what a stream may cost is seen in Redis alone
    key = f"tiller:completions:tokens:{stage.id.hex}"
    assert client.xlen(key) == ENTRIES_MAX
    assert 0 < client.ttl(key) <= ANSWER_SECONDS
    with pytest.raises(ApiError):
        stage.read()


def test_a_feed_is_seen_while_it_reads_and_missed_when_it_is_closed(stage):
    assert stage.line.unread([stage.id]) == {stage.id}
    stage.line.open_stream(stage.id)
    assert stage.line.unread([stage.id]) == set()

    async def look():
        desk = Desk(stage.database, stage.redis_url)
        feed = TokenFeed(desk, stage.prepared)
        await feed.poll()
        during = stage.line.unread([stage.id])
        await feed.close()
        await desk.close()
        return during

    assert asyncio.run(look()) == set()
    assert stage.line.unread([stage.id]) == {stage.id}
    assert stage.state() == "running", "its worker ends it"
    assert READER_SECONDS < ANSWER_SECONDS
    stage.succeed(tokens=0)


def test_a_client_that_is_gone_before_the_first_token_is_noticed(stage):
    async def gone():
        return {"type": "http.disconnect"}

    async def first():
        desk = Desk(stage.database, stage.redis_url)
        feed = TokenFeed(desk, stage.prepared)
        request = Request({"type": "http", "method": "POST", "headers": []}, gone)
        try:
            await feed.first(request)
        finally:
            await feed.close()
            await desk.close()

    with pytest.raises(ClientLeftError):
        asyncio.run(first())
    stage.succeed(tokens=0)


def test_a_refusal_is_no_stream(api):
    fields = {"model": "tiny", "prompt": [2, 3], "stream": True}
    before = api.numbers()
    for change, status, code in (
        ({"temperature": "1"}, 400, "invalid_request"),
        ({"max_tokens": 10_000}, 400, "context_length_exceeded"),
        ({"model": "other"}, 404, "model_not_found"),
        ({}, 503, "no_worker"),
    ):
        answer = api.client.post("/v1/completions", json={**fields, **change})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert api.numbers() == before
