"""A Redis without room: who waits is still seen, and small streams do not block each other."""

import asyncio

import pytest
import redis

from app.completions.line import READER_SECONDS, Bell, Line, Reader
from app.kit.ids import new_uuid
from tests.completions_api.test_redis_memory import piece, sending, until
from worker import completion_stream
from worker.completion_stream import LINGER_BYTES

WAIT_SECONDS = 60.0
KIB = "x" * 1024


def test_who_waits_is_seen_although_redis_is_full(redis_url):
    line, waits, other = Line(redis_url), new_uuid(), new_uuid()
    line.open_reader(waits)
    key = f"tiller:completions:reader:{waits.hex}"

    async def stay():
        bell = Bell(redis_url, waiting_max=4)
        try:
            await bell.stay(waits)
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                await bell.stay(other)  # it is really full
        finally:
            await bell.close()

    with redis.Redis.from_url(redis_url) as client:
        assert client.persist(key)
        client.config_set("maxmemory", 1)
        try:
            asyncio.run(stay())
            assert 0 < client.ttl(key) <= READER_SECONDS
        finally:
            client.config_set("maxmemory", "512mb")
    assert line.readers([waits, other]) == {waits: Reader.reads, other: Reader.missing}
    line.close()


def test_a_late_sign_does_not_take_back_that_a_client_left(redis_url):
    line, name = Line(redis_url), new_uuid()

    async def both():
        bell = Bell(redis_url, waiting_max=4)
        await bell.stay(name)
        before = line.readers([name])[name]
        await bell.leave(name)
        await bell.stay(name)
        await bell.close()
        return before, line.readers([name])[name]

    assert asyncio.run(both()) == (Reader.reads, Reader.left)
    line.close()


def test_an_account_that_small_streams_hold_up_goes_on_once_they_are_read(redis_url, monkeypatch):
    monkeypatch.setattr(completion_stream, "ACCOUNT_BYTES", 8 * len(KIB))
    monkeypatch.setattr(completion_stream, "ENTRY_BYTES", 1)
    pieces = 3

    async def main():
        async with sending(redis_url) as at:
            mine = [at.open(account) for account in [new_uuid()] * 12]
            for number in range(pieces):
                for stream in mine:
                    stream.give(0, piece(number, KIB))
            read = {stream: [] for stream in mine}

            def unread():
                return sum(stream.unread_bytes for stream in mine)

            await until(lambda: unread() >= 8 * len(KIB), "the account's part")
            assert all(stream.has_more for stream in mine), "it must wait"
            assert all(stream.unread_bytes <= LINGER_BYTES for stream in mine)
            async with asyncio.timeout(WAIT_SECONDS):
                while any(len(texts) < pieces for texts in read.values()):
                    for stream, texts in read.items():
                        texts += [each["text"] for each in await at.read(stream)]
                    await asyncio.sleep(0.01)
            assert list(read.values()) == [[f"{n} {KIB}" for n in range(pieces)]] * len(mine)
            return at.failed

    assert asyncio.run(main()) == []
