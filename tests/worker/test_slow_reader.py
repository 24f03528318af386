"""Streams that are read too slowly, and Completions whose reader Redis never knew of."""

import asyncio

import pytest

from app.completions.intake import PreparedCompletion
from app.completions.records import claim_completion, store_completion
from app.completions.spec import RequestSpec, Sampling
from app.completions.stream import TokenFeed
from app.completions.waiting import Desk
from app.errors import ApiError
from app.kit.ids import new_uuid
from tests.checker import check_everything
from tests.worker.listening import listening
from worker import completion_stream, completions

BALANCE = 10_000
PROMPT = (6, 7, 8)
WAIT_SECONDS = 60.0
SHORT_SECONDS = 12.0  # a life of which five are kept for its end


async def until(condition, what):
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            assert what
            await asyncio.sleep(0.01)


def a_stream(tokens, **sampling):
    return PreparedCompletion(
        model=None,  # a feed does not look at it
        specs=(RequestSpec(PROMPT, None, Sampling(max_tokens=tokens, **sampling)),),
        vectors={},
        return_token_ids=False,
        stream=True,
        include_usage=False,
    )


def put_in_line(at, account_id, prepared, seconds):
    """Send a stream whose API says for ever that it is read, and reads nothing yet."""
    with at.database.transaction() as conn:
        store_completion(
            conn,
            account_id,
            prepared.id,
            model="tiny",
            specs=prepared.specs,
            seconds=seconds,
            stream=True,
        )
    at.line.open_reader(prepared.id)
    at.line._redis.persist(f"tiller:completions:reader:{prepared.id.hex}")
    at.line.put("tiny", prepared.id)


async def read_all(database, redis_url, prepared):
    """Read a stream as the API does; give how many tokens came, and the error at its end."""
    desk = Desk(database, redis_url, waiting_max=8)
    feed = TokenFeed(desk, prepared)
    tokens = 0
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while (pieces := await feed.poll()) is not None:
                tokens += sum(len(piece["token_ids"]) for piece in pieces)
            await feed.last()
    except ApiError as error:
        return tokens, error
    else:
        return tokens, None
    finally:
        await feed.close()
        await desk.close()


@pytest.fixture
def heavy(monkeypatch):
    """Every token counts as if it filled what a stream may have in Redis."""
    for name, value in (("STREAM_BYTES", 1), ("ENTRY_BYTES", 1), ("LINGER_BYTES", 0)):
        monkeypatch.setattr(completion_stream, name, value)


@pytest.mark.usefixtures("heavy")
def test_a_stream_that_is_not_read_in_time_is_charged_and_who_reads_on_is_told(
    database, redis_url, builders, tmp_path, monkeypatch
):
    monkeypatch.setattr(completions, "READING_SECONDS", 0.0)
    first, second = (a_stream(50, logprobs=5) for _ in range(2))  # of 500 entries, 300 each

    async def main():
        account = builders.an_account(balance=BALANCE)
        async with listening(database, redis_url, builders, tmp_path) as at:
            at.engine.gate.set()
            put_in_line(at, account, first, 600)
            await until(lambda: at.state(first.id) == "cancelled", "its end")
            balance = at.balance(account)
            put_in_line(at, account, second, 600)
            await until(lambda: at.state(second.id) == "cancelled", "its share of the logprobs")
            tokens, error = await read_all(database, redis_url, first)
            assert at.engine.requests_run == 2
            return balance, at.balance(account), tokens, error

    balance, later, tokens, error = asyncio.run(main())
    assert balance == (BALANCE - 53, 0), "the prompt and all that was made"
    assert later == (BALANCE - 2 * 53, 0), "once each"
    assert tokens == 1, "what lay in Redis is still read"
    assert (error.status, error.code) == (408, "stream_not_read")
    check_everything(database)


@pytest.mark.usefixtures("heavy")
def test_a_stream_that_is_not_read_ends_before_its_time_is_over(
    database, redis_url, builders, tmp_path
):
    prepared = a_stream(50)

    async def main():
        account = builders.an_account(balance=BALANCE)
        async with listening(database, redis_url, builders, tmp_path) as at:
            at.engine.gate.set()
            put_in_line(at, account, prepared, SHORT_SECONDS)
            await until(lambda: at.state(prepared.id) not in ("pending", "running"), "its end")
            return at.state(prepared.id), at.balance(account)

    assert asyncio.run(main()) == ("cancelled", (BALANCE - 53, 0))
    check_everything(database)


@pytest.mark.usefixtures("heavy")
def test_a_stream_that_is_read_one_token_after_the_other_succeeds(
    database, redis_url, builders, tmp_path
):
    prepared = a_stream(8)

    async def main():
        account = builders.an_account(balance=BALANCE)
        async with listening(database, redis_url, builders, tmp_path) as at:
            at.engine.gate.set()
            put_in_line(at, account, prepared, 600)
            await until(lambda: at.engine.requests_run and not at.engine.inside, "the engine")
            assert at.state(prepared.id) == "running", "most of it waits in the worker"
            read = await read_all(database, redis_url, prepared)
            return read, at.state(prepared.id), at.balance(account)

    assert asyncio.run(main()) == ((8, None), "succeeded", (BALANCE - 11, 0))
    check_everything(database)


def test_the_time_to_read_ends_before_that_of_the_row(database, builders):
    lives = (600.0, 65.0, 64.0, 12.0, 8.0, 0.5)
    times = [completions.reading_seconds(left) for left in lives]
    assert times == [60.0, 60.0, 59.0, 7.0, 4.0, 0.25]
    assert completions.reading_seconds(0.0) is None, "it expires, whoever reads"
    account, worker, prepared = builders.an_account(), builders.a_worker(), a_stream(4)
    with database.transaction() as conn:
        store_completion(
            conn, account, prepared.id, model="tiny", specs=prepared.specs, seconds=3600
        )
    with database.transaction() as conn:
        claimed = claim_completion(conn, prepared.id, worker.worker_id, model="tiny")
    assert 3000 < claimed.seconds_left < 3600


def test_a_plain_one_whose_reader_was_never_seen_goes_on(database, redis_url, builders, tmp_path):
    spec = RequestSpec(PROMPT, None, Sampling(max_tokens=2))

    async def main():
        account = builders.an_account(balance=BALANCE)
        async with listening(database, redis_url, builders, tmp_path) as at:
            unknown, seen, left = (new_uuid() for _ in range(3))
            with database.transaction() as conn:
                for name in (unknown, seen, left):
                    store_completion(conn, account, name, model="tiny", specs=[spec], seconds=600)
            for name in (seen, left):
                at.line.open_reader(name)
                at.line._redis.persist(f"tiller:completions:reader:{name.hex}")
            for name in (unknown, seen, left):
                at.line.put("tiny", name)
            await until(lambda: len(at.engine.inside) == 3, "the engine")
            # The look that ends this one has seen the other.
            await at.bell.leave(left)
            await until(lambda: at.state(left) == "cancelled", "the one that was left")
            at.line._redis.delete(f"tiller:completions:reader:{seen.hex}")
            await until(lambda: at.state(seen) == "cancelled", "the one whose API died")
            # It was missing for longer.
            assert at.of(unknown) == 1
            at.engine.gate.set()
            await until(lambda: at.state(unknown) != "running", "its end")
            return at.state(unknown), at.balance(account)

    assert asyncio.run(main()) == ("succeeded", (BALANCE - 5, 0))
    check_everything(database)
