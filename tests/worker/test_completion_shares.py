"""What one account may have in the engine at once: choices, and the memory of logprobs."""

import asyncio
from itertools import groupby

import redis

from app.completions.line import ANSWER_SECONDS, READER_SECONDS
from app.completions.records import cancel_completion
from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Site
from tests.checker import check_everything
from tests.worker.listening import listening, until

PROMPT = (6, 7, 8)
SEATS = 32  # of the stub


def request(**sampling):
    return RequestSpec(PROMPT, None, Sampling(max_tokens=2, **sampling))


def test_an_account_with_many_choices_leaves_room_for_anothers_completion(
    database, redis_url, builders, tmp_path
):
    async def main():
        greedy, other = builders.an_account(), builders.an_account()
        async with listening(database, redis_url, builders, tmp_path) as at:
            many = [at.send(greedy, request(n=20)) for _ in range(4)]
            await until(lambda: len(at.engine.inside) == SEATS, "a full batch")
            late = at.send(other, request())
            await until(lambda: at.waits(other), "it to wait for its turn")
            assert len(at.engine.inside) == SEATS
            at.engine.gate.set()
            for completion_id in (late, *many):
                await until(lambda name=completion_id: at.state(name) == "succeeded", "all")
            return [key.split(".")[0] for key in at.engine.begun], late

    begun, late = asyncio.run(main())
    assert begun.count(late.hex) == 1
    assert begun.index(late.hex) == SEATS, "it came in as soon as one choice had ended"
    of_greedy = [name for name in begun if name != late.hex]
    assert [len(list(choices)) for _, choices in groupby(of_greedy)] == [20] * 4, "one by one"
    check_everything(database)


def test_logprobs_that_would_fill_the_memory_wait_and_hold_nobody_else_up(
    database, redis_url, builders, tmp_path
):
    async def main():
        greedy, other = builders.an_account(), builders.an_account()
        listed = request(logprobs=99)  # 2 tokens x 100 alternatives
        async with listening(database, redis_url, builders, tmp_path) as at:
            many = [at.send(greedy, listed) for _ in range(5)]
            plain = at.send(greedy, request())
            others = at.send(other, listed)
            running = lambda: (at.of(others), at.of(plain), sum(map(at.of, many)))  # noqa: E731
            # 500 entries of one account: two of its five.
            await until(lambda: running() == (1, 1, 2), "what may run")
            at.engine.gate.set()
            for completion_id in (*many, plain, others):
                await until(lambda name=completion_id: at.state(name) == "succeeded", "all")

    asyncio.run(main())
    check_everything(database)


def test_one_that_waits_for_its_turn_can_be_cancelled(database, redis_url, builders, tmp_path):
    async def main():
        account = builders.an_account(balance=10_000)
        listed = request(logprobs=99, n=3)
        async with listening(database, redis_url, builders, tmp_path) as at:
            # One after another: what is sent together is claimed in any order.
            first = at.send(account, listed)
            await until(lambda: at.of(first) == 3, "the first to run")
            second = at.send(account, listed)
            await until(lambda: at.state(second) == "running", "the second to be taken")
            third = at.send(account, listed)
            await at.bell.leave(second)
            await until(lambda: at.state(second) == "cancelled", "its end")
            at.engine.gate.set()
            await until(lambda: at.state(third) == "succeeded", "the third")
            assert not any(key.startswith(second.hex) for key in at.engine.begun)
            return at.balance(account)

    assert asyncio.run(main()) == (10_000 - 2 * (3 + 3 * 2), 0)
    check_everything(database)


def keys_of(redis_url, completion_id):
    with redis.Redis.from_url(redis_url) as client:
        return {
            name.decode().split(":")[2] for name in client.keys(f"tiller:*:{completion_id.hex}")
        }


def test_the_answer_of_a_plain_client_that_left_is_not_kept(
    database, redis_url, builders, tmp_path
):
    capture = Capture("residual_stream", Site.resid_post, (0, 1))
    spec = RequestSpec(PROMPT, None, Sampling(max_tokens=200), captures=(capture,))

    async def main():
        account = builders.an_account(balance=10_000)
        async with listening(database, redis_url, builders, tmp_path) as at:
            gone = at.send(account, spec)
            await until(lambda: at.of(gone) == 1, "the engine to have it")
            at.engine.gate.set()
            with database.transaction() as conn:
                # Its row ends while the worker writes the answer.
                assert cancel_completion(conn, gone)
            await until(lambda: not at.engine.inside, "its end")
        return at.state(gone), at.balance(account), keys_of(redis_url, gone)

    state, balance, keys = asyncio.run(main())
    assert (state, balance) == ("cancelled", (10_000, 0))
    assert "answer" not in keys
    check_everything(database)


def test_what_nobody_waits_for_any_more_is_aborted_and_a_plain_one_released(
    database, redis_url, builders, tmp_path
):
    async def main():
        account = builders.an_account(balance=10_000)
        async with listening(database, redis_url, builders, tmp_path) as at:
            left, dead, alive = (at.send(account, request()) for _ in range(3))
            await until(lambda: at.of(left) + at.of(dead) + at.of(alive) == 3, "the engine")
            await at.bell.leave(left)
            await until(lambda: at.state(left) == "cancelled", "the one that was left to end")

            def staying():
                at.line.open_reader(alive)  # as its API does; that of `dead` says nothing
                return at.state(dead) == "cancelled"

            at.line._redis.delete(f"tiller:completions:reader:{dead.hex}")
            await until(staying, "the one whose API died to end")
            assert at.of(alive) == 1
            assert at.balance(account) == (10_000, 5)
            at.engine.gate.set()
            await until(lambda: at.state(alive) == "succeeded", "the third")
            return at.balance(account)

    assert asyncio.run(main()) == (10_000 - 5, 0)
    assert READER_SECONDS < ANSWER_SECONDS
    check_everything(database)
