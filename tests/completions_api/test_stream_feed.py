"""What the API makes of a stream in Redis: order, loss and the end, which Postgres decides."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import orjson
import pytest
from starlette.requests import Request

from app.completions import waiting
from app.completions.intake import PreparedCompletion
from app.completions.line import (
    ANSWER_SECONDS,
    READ_ENTRIES,
    READER_SECONDS,
    Bell,
    Line,
    Reader,
    TokenEntry,
)
from app.completions.records import (
    Failure,
    claim_completion,
    store_completion,
    succeed_completion,
)
from app.completions.stream import BIG_BYTES, TokenFeed
from app.completions.stream_answer import stream_answer
from app.completions.stream_chunks import ChunkWriter
from app.completions.waiting import ClientLeftError, Desk, Lookout, error_of
from app.errors import ApiError
from app.kit.db import Database, DatabaseUnavailableError
from app.kit.ids import new_uuid
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

    def desk(self, database=None):
        return Desk(database or self.database, self.redis_url, waiting_max=8)

    def reader(self):
        return self.line.readers([self.id])[self.id]

    def put(self, *numbers, tokens=1, text="a"):
        piece = {"place": 0, "index": 0, "text": text, "token_ids": [5] * tokens}
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
            desk = self.desk()
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
        desk = stage.desk()
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
    assert stage.reader() is Reader.missing
    stage.line.open_reader(stage.id)
    assert stage.reader() is Reader.reads

    async def look():
        desk = stage.desk()
        feed = TokenFeed(desk, stage.prepared)
        await feed.poll()
        during = stage.reader()
        await feed.close()
        await desk.close()
        return during

    assert asyncio.run(look()) is Reader.reads
    assert stage.reader() is Reader.left
    assert stage.state() == "running", "its worker ends it"
    assert READER_SECONDS < ANSWER_SECONDS
    stage.succeed(tokens=0)


def test_a_client_that_is_gone_before_the_first_token_is_noticed(stage):
    async def gone():
        return {"type": "http.disconnect"}

    async def first():
        desk = stage.desk()
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


@pytest.fixture
def no_database():
    """A pool whose Postgres is not there."""
    database = Database("postgresql://127.0.0.1:1/none", wait_seconds=0.1)
    yield database
    database.close()


def staying_request():
    async def nothing():
        await asyncio.Event().wait()

    return Request({"type": "http", "method": "POST", "headers": []}, nothing)


def answered(stage, prepared, database=None):
    """Answer with a stream as the route does; give what was sent."""
    sent = []

    async def send(message):
        sent.append(message)

    async def everything():
        desk = stage.desk(database)
        request = staying_request()
        try:
            answer = await stream_answer(
                request, desk, prepared, lambda: ChunkWriter(prepared, None), on_close=lambda: None
            )
            scope = {"type": "http", "state": {"request_id": "req_1"}}
            await answer(scope, request.receive, send)
        finally:
            await desk.close()

    asyncio.run(everything())
    return sent


def test_an_error_of_ours_before_the_first_chunk_is_not_charged(stage):
    stage.put(0)
    with pytest.raises(AttributeError):
        answered(stage, stage.prepared)  # without a model no chunk can be written
    assert (stage.state(), stage.reader()) == ("errored", Reader.failed)
    assert stage.numbers() == (BALANCE, 0)


def test_an_error_of_ours_after_the_status_is_told_and_not_charged(stage):
    stage.put(0)  # a piece that lacks most of its fields
    model = SimpleNamespace(name="tiny", special_token_ids=())
    sent = answered(stage, replace(stage.prepared, model=model))
    assert sent[0]["status"] == 200
    body = b"".join(message.get("body", b"") for message in sent)
    assert b"internal_error" in body
    assert b"[DONE]" not in body
    assert (stage.state(), stage.reader()) == ("errored", Reader.failed)
    assert stage.numbers() == (BALANCE, 0)


def test_where_postgres_is_away_from_the_api_the_worker_hears_that_it_failed(
    stage, no_database, monkeypatch
):
    monkeypatch.setattr(waiting, "AWAY_SECONDS", 0.0)
    with pytest.raises(DatabaseUnavailableError):
        answered(stage, stage.prepared, no_database)
    assert stage.reader() is Reader.failed
    assert stage.state() == "running"
    stage.succeed(tokens=0)


def test_a_look_is_patient_with_a_postgres_that_is_away(stage, no_database, monkeypatch):
    async def look(desk):
        try:
            return await Lookout(desk, stage.id).look()
        finally:
            await desk.close()

    assert asyncio.run(look(stage.desk())).state == "running"
    assert asyncio.run(look(stage.desk(no_database))) is None
    monkeypatch.setattr(waiting, "AWAY_SECONDS", 0.0)
    with pytest.raises(DatabaseUnavailableError):
        asyncio.run(look(stage.desk(no_database)))
    stage.succeed(tokens=0)


def test_big_pieces_arrive_whole(stage):
    texts = ["a" * BIG_BYTES, "b"]

    async def both():
        desk = stage.desk()
        feed = TokenFeed(desk, stage.prepared)
        seen = []
        for number, text in enumerate(texts):
            stage.put(number, text=text)
            (piece,) = await feed.poll()
            seen.append((piece["text"], feed.was_big))
        await feed.close()
        await desk.close()
        return seen

    assert asyncio.run(both()) == [(texts[0], True), (texts[1], False)]
    stage.succeed(tokens=2)


def test_the_end_of_a_stream_is_kept_for_a_slow_reader(stage):
    stage.put(0)
    stage.succeed(tokens=1)
    client = stage.line._redis  # how long something is kept is seen in Redis alone
    key = f"tiller:completions:answer:{stage.id.hex}"
    client.expire(key, 2)

    async def stay():
        desk = stage.desk()
        await desk.bell.stay(stage.id)
        await desk.close()

    asyncio.run(stay())
    assert client.ttl(key) > ANSWER_SECONDS - 5


def test_as_many_wait_at_once_as_may(redis_url):
    waiters = 150  # more than redis-py allows unless it is told otherwise

    async def all_at_once():
        bell = Bell(redis_url, waiting_max=waiters)
        ids = [new_uuid() for _ in range(waiters)]
        try:
            waits = [bell.wait(each, 2) for each in ids]
            stays = [bell.stay(each) for each in ids]
            return await asyncio.gather(*waits, *stays)
        finally:
            await bell.close()

    assert asyncio.run(all_at_once()) == [False] * waiters + [None] * waiters


def test_too_many_captured_rows_are_the_fault_of_the_request():
    error = error_of(Failure("captured_rows_too_large", "Too many.", "requests"))
    assert (error.status, error.code, error.param) == (400, "captured_rows_too_large", "requests")


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
