"""Redis between the API and workers: which Completions wait, and their answers.

    tiller:completions:<model>       a list of ids that workers of the model take from
    tiller:completions:done:<id>     gets one item when the Completion has ended
    tiller:completions:answer:<id>   what the engine gave, for a minute
    tiller:completions:tokens:<id>   a stream of what it gives as it comes, and a mark at its end
    tiller:completions:reader:<id>   there while somebody waits for it, and then why that ended

Nothing here is the truth: rows in Postgres are. What Redis loses, ends there after seconds. Its
memory is everybody's: what was read is trimmed, and what nobody will read is deleted.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

import redis
import redis.asyncio
from redis.exceptions import RedisError

PREFIX = "tiller:completions:"
ANSWER_SECONDS = 60
SOCKET_SECONDS = 5.0  # longer than any wait for an item
WAITING_SECONDS = 60  # an id that nobody takes for so long belongs to a Completion that ended
READER_SECONDS = 6  # after the last sign of a reader; its process may have died
SPARE_CONNECTIONS = 16
READ_ENTRIES = 64  # of a stream at once: a slow client's tokens wait in Redis, not in the API
FIRST_KEY = b"0"  # before all entries of a stream
END_FIELD, NUMBER_FIELD, PIECES_FIELD = b"end", b"number", b"pieces"
PUSH = "redis.call('RPUSH', KEYS[1], ARGV[1]); redis.call('EXPIRE', KEYS[1], ARGV[2])"
# A stream that is refused says why, and the others go on.
APPEND = """
    local held = {}
    for i = 1, #KEYS do
        local added = redis.pcall('XADD', KEYS[i], 'MAXLEN', ARGV[3 * i - 1], '*',
            'number', ARGV[3 * i], 'pieces', ARGV[3 * i + 1])
        if type(added) == 'table' then
            held[i] = added.err
        else
            redis.call('EXPIRE', KEYS[i], ARGV[1])
            held[i] = redis.call('XLEN', KEYS[i])
        end
    end
    return held
"""
COUNT = """
    local held = {}
    for i = 1, #KEYS do held[i] = redis.call('XLEN', KEYS[i]) end
    return held
"""
END = "redis.call('XADD', KEYS[1], '*', 'end', '1'); redis.call('EXPIRE', KEYS[1], ARGV[1])"
BROKER_ERRORS = (RedisError, OSError)


class Reader(StrEnum):
    """What is known of who waits for a Completion; `missing` is also what an empty Redis says."""

    reads = "reads"
    left = "left"
    failed = "failed"  # the API told its client that nothing counts
    missing = "missing"

    @property
    def has_failed(self) -> bool:
        """Tell whether the client was told that nothing counts."""
        return self is Reader.failed


_ENDS = {why.value.encode(): why for why in (Reader.left, Reader.failed)}


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """Pieces of a stream as JSON, numbered from 0; a stream never has more than `entries_max`."""

    completion_id: UUID
    number: int
    pieces: bytes
    entries_max: int


@dataclass(frozen=True, slots=True)
class ReadEntry:
    """An entry as read: where it stands in Redis, its number and its pieces, or the end mark."""

    key: bytes
    number: int = 0
    pieces: bytes = b"[]"
    is_end: bool = False


class Line:
    """The blocking side: the API puts ids in, workers take them and put answers."""

    def __init__(self, redis_url: str) -> None:
        """Connect on first use; every call raises one of BROKER_ERRORS when Redis is away."""
        self._redis = redis.Redis.from_url(
            redis_url,
            socket_connect_timeout=1.0,
            socket_timeout=SOCKET_SECONDS,
            health_check_interval=10,
            retry=None,
        )

    def put(self, model: str, completion_id: UUID) -> None:
        """Let workers of the model know of a Completion."""
        self._push(f"{PREFIX}{model}", completion_id.bytes, WAITING_SECONDS)

    def put_back(self, model: str, completion_id: UUID) -> None:
        """Give back an id that was taken, in front of all others."""
        self._redis.lpush(f"{PREFIX}{model}", completion_id.bytes)

    def take(self, model: str, seconds: float) -> UUID | None:
        """Take the next id, waiting for it for at most `seconds`."""
        item = self._redis.blpop([f"{PREFIX}{model}"], timeout=seconds)
        return None if item is None else UUID(bytes=_bytes(item[1]))

    def put_answer(self, completion_id: UUID, answer: bytes) -> None:
        """Keep an answer for the API; nobody is told yet."""
        self._redis.set(_answer(completion_id), answer, ex=ANSWER_SECONDS)

    def ring(self, completion_id: UUID) -> None:
        """Tell the API that a Completion has ended."""
        self._push(f"{PREFIX}done:{completion_id.hex}", b"1", ANSWER_SECONDS)

    def read_answer(self, completion_id: UUID) -> bytes | None:
        """Take the answer of a Completion out; None when there is none."""
        answer = self._redis.getdel(_answer(completion_id))
        return answer if isinstance(answer, bytes) else None

    def open_reader(self, completion_id: UUID) -> None:
        """Say that somebody waits for a Completion, for READER_SECONDS."""
        self._redis.set(_reader(completion_id), Reader.reads.value, ex=READER_SECONDS)

    def put_tokens(self, entries: Sequence[TokenEntry]) -> list[int | RedisError]:
        """Append to streams, in one round trip; each ends by itself a while after the last.

        Gives for each how many entries it holds now, read ones among them, or why this one alone
        was not taken.
        """
        if not entries:
            return []
        keys = [_tokens(entry.completion_id) for entry in entries]
        values: list[Any] = [ANSWER_SECONDS]
        for entry in entries:
            values += (entry.entries_max, entry.number, entry.pieces)
        held: Any = self._redis.eval(APPEND, len(keys), *keys, *values)
        return [each if isinstance(each, int) else RedisError(each.decode()) for each in held]

    def count_entries(self, completion_ids: Sequence[UUID]) -> list[int]:
        """Count what each of these streams holds; of one that has ended, nothing."""
        if not completion_ids:
            return []
        keys = [_tokens(completion_id) for completion_id in completion_ids]
        counts: Any = self._redis.eval(COUNT, len(keys), *keys)
        return [int(count) for count in counts]

    def end_tokens(self, completion_id: UUID) -> None:
        """Mark the end of a stream: its Completion has ended."""
        self._redis.eval(END, 1, _tokens(completion_id), str(ANSWER_SECONDS))

    def readers(self, completion_ids: Collection[UUID]) -> dict[UUID, Reader]:
        """Say for each of these Completions whether somebody waits for it."""
        ids = list(completion_ids)
        found: Any = self._redis.mget([_reader(completion_id) for completion_id in ids])
        return {
            name: Reader.missing if reader is None else _ENDS.get(reader, Reader.reads)
            for name, reader in zip(ids, found, strict=True)
        }

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _push(self, key: str, item: bytes, seconds: int) -> None:
        """Append to a list that ends by itself; both at once, so that none stays for ever."""
        self._redis.eval(PUSH, 1, key, item, str(seconds))


class Bell:
    """The waiting side of the API: many requests wait at once on one event loop."""

    def __init__(self, redis_url: str, *, waiting_max: int) -> None:
        """Connect on first use; `waiting_max` requests may wait at once."""
        self._redis = redis.asyncio.Redis.from_url(
            redis_url,
            socket_connect_timeout=1.0,
            socket_timeout=SOCKET_SECONDS,
            # One waits, and another says meanwhile that somebody reads.
            max_connections=2 * waiting_max + SPARE_CONNECTIONS,
        )

    async def wait(self, completion_id: UUID, seconds: float) -> bool:
        """Wait until a Completion has ended, for at most `seconds`; tell whether it was rung.

        Raises one of BROKER_ERRORS when Redis is away.
        """
        key = f"{PREFIX}done:{completion_id.hex}"
        return await self._redis.blpop([key], timeout=seconds) is not None

    async def read_tokens(
        self, completion_id: UUID, after: bytes, seconds: float
    ) -> list[ReadEntry]:
        """Read what follows `after` in a stream, waiting for at most `seconds` (0: not at all).

        What came before is had, and leaves Redis; what is read now stays, as it may get lost on
        its way. Raises one of BROKER_ERRORS when Redis is away.
        """
        if after != FIRST_KEY:
            await self._redis.xtrim(_tokens(completion_id), minid=_next(after), approximate=False)
        block = int(seconds * 1000) or None
        found: Any = await self._redis.xread(
            {_tokens(completion_id): after}, count=READ_ENTRIES, block=block
        )
        return [_read_entry(key, fields) for _, entries in found for key, fields in entries]

    async def stay(self, completion_id: UUID) -> None:
        """Say that somebody still waits; what is there to be read is kept as long."""
        await self._redis.expire(_tokens(completion_id), ANSWER_SECONDS)
        await self._redis.expire(_answer(completion_id), ANSWER_SECONDS)
        # A Redis that is full still prolongs what it has, and refuses every SET.
        if not await self._redis.expire(_reader(completion_id), READER_SECONDS):
            await self._redis.set(
                _reader(completion_id), Reader.reads.value, ex=READER_SECONDS, nx=True
            )

    async def leave(self, completion_id: UUID, *, failed: bool = False) -> None:
        """Say that nobody waits any more: the client left, or the API `failed` its stream."""
        why = Reader.failed if failed else Reader.left
        await self._redis.set(_reader(completion_id), why.value, ex=ANSWER_SECONDS)
        await self._redis.delete(_tokens(completion_id), _answer(completion_id))

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


def _tokens(completion_id: UUID) -> str:
    return f"{PREFIX}tokens:{completion_id.hex}"


def _answer(completion_id: UUID) -> str:
    return f"{PREFIX}answer:{completion_id.hex}"


def _reader(completion_id: UUID) -> str:
    return f"{PREFIX}reader:{completion_id.hex}"


def _next(key: bytes) -> str:
    """Give the least key after an entry's."""
    milliseconds, number = key.split(b"-")
    return f"{milliseconds.decode()}-{int(number) + 1}"


def _read_entry(key: bytes, fields: Mapping[bytes, bytes]) -> ReadEntry:
    if END_FIELD in fields:
        return ReadEntry(key, is_end=True)
    return ReadEntry(key, int(fields[NUMBER_FIELD]), fields[PIECES_FIELD])


def _bytes(item: object) -> bytes:
    assert isinstance(item, bytes)  # decode_responses is off
    return item
