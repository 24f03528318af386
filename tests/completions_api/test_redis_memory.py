"""Redis is everybody's: how much of it a stream, and all of one account, may fill.

The Redis of these tests is the real one with little memory.
"""

import asyncio
import contextlib
import operator

import orjson
import redis

from app.completions.line import FIRST_KEY, READ_ENTRIES, Bell, Line, TokenEntry
from app.completions.records import ClaimedCompletion
from app.completions.spec import RequestSpec, Sampling
from app.kit.ids import new_uuid
from worker import completion_stream
from worker.completion_stream import (
    ACCOUNT_BYTES,
    ENTRY_BYTES,
    NO_BROKER,
    STREAM_BYTES,
    TokenSender,
)
from worker.engine.protocol import Piece
from worker.outcomes import TokenLogprob

WAIT_SECONDS = 20.0
SPEC = RequestSpec((6, 7, 8), None, Sampling(max_tokens=100_000))
KIB64 = "x" * (64 * 1024)


class Sending:
    """A worker's sender on a real Redis, and clients that read when they are told to."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        self.client = redis.Redis.from_url(redis_url)
        self.line = Line(redis_url)
        self.bell = Bell(redis_url, waiting_max=8)
        self.failed: list[object] = []
        self.sender = TokenSender(self.line, asyncio.to_thread)
        self.after: dict[object, bytes] = {}

    def open(self, account_id):
        claimed = ClaimedCompletion(new_uuid(), account_id, (SPEC,), stream=True)
        return self.sender.open(claimed, lambda: self.failed.append(claimed.id))

    def held(self, *streams):
        """Bytes of the streams in Redis."""
        return sum(self.client.memory_usage(self.key(each)) or 0 for each in streams)

    def key(self, stream):
        return f"tiller:completions:tokens:{stream.completion_id.hex}"

    async def read(self, stream):
        """Read what is there, as the API does; give its pieces."""
        name = stream.completion_id
        entries = await self.bell.read_tokens(name, self.after.get(name, FIRST_KEY), 0)
        if entries:
            self.after[name] = entries[-1].key
        return [piece for entry in entries for piece in orjson.loads(entry.pieces)]


@contextlib.asynccontextmanager
async def sending(redis_url, *, memory=None):
    made = Sending(redis_url)
    if memory is not None:
        made.client.config_set("maxmemory", made.client.info("memory")["used_memory"] + memory)
    running = asyncio.ensure_future(made.sender.run())
    try:
        yield made
    finally:
        running.cancel()
        made.client.config_set("maxmemory", "512mb")
        made.client.close()
        made.line.close()
        await made.bell.close()


async def until(condition, what):
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            assert what
            await asyncio.sleep(0.01)


def piece(number, text=KIB64):
    return Piece(0, f"{number} {text}", (number,), None)


def test_what_was_read_leaves_redis_and_what_got_lost_on_its_way_does_not(redis_url):
    line, name = Line(redis_url), new_uuid()
    count = 3 * READ_ENTRIES
    line.put_tokens([TokenEntry(name, i, b"[%d]" % i, count) for i in range(count)])

    async def read():
        bell = Bell(redis_url, waiting_max=4)
        lost = await bell.read_tokens(name, FIRST_KEY, 0)
        assert await bell.read_tokens(name, FIRST_KEY, 0) == lost
        after, numbers, held = FIRST_KEY, [], []
        while entries := await bell.read_tokens(name, after, 0):
            numbers += [entry.number for entry in entries]
            held += line.count_entries([name])
            after = entries[-1].key
        held += line.count_entries([name])
        again = await bell.read_tokens(name, after, 0)
        line.put_tokens([TokenEntry(name, count, b"[]", count)])
        later = await bell.read_tokens(name, after, 0)
        await bell.close()
        return numbers, held, again, [entry.number for entry in later]

    numbers, held, again, later = asyncio.run(read())
    line.close()
    assert numbers == list(range(count))
    assert held == [count, count - READ_ENTRIES, READ_ENTRIES, 0]
    assert (again, later) == ([], [count])


def test_one_stream_that_redis_refuses_ends_alone(redis_url):
    async def main():
        async with sending(redis_url) as at:
            account = new_uuid()
            bad, good = at.open(account), at.open(account)
            at.client.set(at.key(bad), "no stream")
            for stream in (bad, good):
                stream.give(0, piece(1, "a"))
            await asyncio.wait_for(asyncio.gather(bad.sent(), good.sent()), WAIT_SECONDS)
            assert [each["text"] for each in await at.read(good)] == ["1 a"]
            return bad.failure, good.failure, at.failed == [bad.completion_id]

    assert asyncio.run(main()) == (NO_BROKER, None, True)


def test_a_client_that_does_not_read_fills_no_redis_and_gets_everything_later(redis_url):
    pieces = 300  # 19 MiB; Redis has room for 8

    async def main():
        async with sending(redis_url, memory=8 * 1024**2) as at:
            slow, quick = at.open(new_uuid()), at.open(new_uuid())
            for number in range(pieces):
                slow.give(0, piece(number))
            await until(lambda: at.held(slow) >= STREAM_BYTES, "what may lie there")
            for number in range(20):
                quick.give(0, piece(number, "a"))
                await asyncio.wait_for(quick.sent(), WAIT_SECONDS)
            assert at.held(slow) <= 1.5 * (STREAM_BYTES + 2 * ENTRY_BYTES)
            at.line.put_answer(quick.completion_id, b"x" * 1024**2)
            at.line.open_reader(quick.completion_id)
            at.line.put("tiny", quick.completion_id)
            assert len(await at.read(quick)) == 20
            texts = []
            async with asyncio.timeout(WAIT_SECONDS):
                while len(texts) < pieces:
                    texts += [each["text"] for each in await at.read(slow)]
                    await asyncio.sleep(0.005)
                await slow.sent()
            assert texts == [f"{number} {KIB64}" for number in range(pieces)]
            return slow.failure, quick.failure, at.failed

    assert asyncio.run(main()) == (None, None, [])


def test_all_streams_of_an_account_together_hold_up_that_account_alone(redis_url):
    streams = 3 + ACCOUNT_BYTES // STREAM_BYTES

    async def main():
        async with sending(redis_url) as at:
            greedy = new_uuid()
            mine = [at.open(greedy) for _ in range(streams)]
            for stream in mine:
                for number in range(2 * STREAM_BYTES // len(KIB64)):
                    stream.give(0, piece(number))

            def unread():
                return [stream.unread_bytes for stream in mine]

            await until(lambda: sum(unread()) >= ACCOUNT_BYTES, "the account's part")
            # Streams that have ended count as long as they are not read.
            ended = next(each for each in mine if each.unread_bytes >= STREAM_BYTES)
            at.sender.close(ended)
            other = at.open(new_uuid())
            other.give(0, piece(0))
            await asyncio.wait_for(other.sent(), WAIT_SECONDS)
            assert at.held(*mine) <= 1.5 * (ACCOUNT_BYTES + ENTRY_BYTES)
            before = unread()
            while await at.read(ended):
                pass
            await until(
                lambda: any(map(operator.gt, unread(), before)), "one of the others to go on"
            )
            return at.failed

    assert asyncio.run(main()) == []


def test_of_pieces_larger_than_its_part_an_account_has_one_at_a_time(redis_url, monkeypatch):
    part = 1024**2
    monkeypatch.setattr(completion_stream, "ACCOUNT_BYTES", part)
    token = tuple(TokenLogprob(i, "x" * 28, -1.5) for i in range(100))
    big = Piece(0, "a", (5,), None, prompt_logprobs=(token,) * (part // 3800))

    async def main():
        async with sending(redis_url, memory=8 * part) as at:
            mine = [at.open(account) for account in [new_uuid()] * 4]
            for stream in mine:
                stream.give(0, big)
            for turn in range(4):
                there = []

                def one_more(there=there):
                    there[:] = [each for each in mine if at.held(each) > part / 2]
                    return there

                await until(one_more, f"the one of turn {turn}")
                (stream,) = there
                assert len(await at.read(stream)) == 1
                assert await at.read(stream) == []
            return at.failed

    assert asyncio.run(main()) == []


def test_a_redis_that_goes_away_ends_what_must_wait():
    async def main():
        line = Line("redis://127.0.0.1:1/0")
        sender = TokenSender(line, asyncio.to_thread)
        running = asyncio.ensure_future(sender.run())
        claimed = ClaimedCompletion(new_uuid(), new_uuid(), (SPEC,), stream=True)
        stream = sender.open(claimed, lambda: None)
        stream.unread_bytes = STREAM_BYTES  # sent while Redis was there
        stream.give(0, piece(0))
        await asyncio.wait_for(stream.sent(), WAIT_SECONDS)
        running.cancel()
        line.close()
        return stream.failure

    assert asyncio.run(main()) == NO_BROKER
