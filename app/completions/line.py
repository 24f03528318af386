"""Redis between the API and workers: which Completions wait, and their answers.

    tiller:completions:<model>       a list of ids that workers of the model take from
    tiller:completions:done:<id>     gets one item when the Completion has ended
    tiller:completions:answer:<id>   what the engine gave, for a minute

Nothing here is the truth: rows in Postgres are. What Redis loses, ends there after seconds.
"""

from uuid import UUID

import redis
import redis.asyncio
from redis.exceptions import RedisError

PREFIX = "tiller:completions:"
ANSWER_SECONDS = 60
SOCKET_SECONDS = 5.0  # longer than any wait for an item
WAITING_SECONDS = 60  # an id that nobody takes for so long belongs to a Completion that ended
PUSH = "redis.call('RPUSH', KEYS[1], ARGV[1]); redis.call('EXPIRE', KEYS[1], ARGV[2])"
BROKER_ERRORS = (RedisError, OSError)


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
        self._redis.set(f"{PREFIX}answer:{completion_id.hex}", answer, ex=ANSWER_SECONDS)

    def ring(self, completion_id: UUID) -> None:
        """Tell the API that a Completion has ended."""
        self._push(f"{PREFIX}done:{completion_id.hex}", b"1", ANSWER_SECONDS)

    def read_answer(self, completion_id: UUID) -> bytes | None:
        """Take the answer of a Completion out; None when there is none."""
        answer = self._redis.getdel(f"{PREFIX}answer:{completion_id.hex}")
        return answer if isinstance(answer, bytes) else None

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _push(self, key: str, item: bytes, seconds: int) -> None:
        """Append to a list that ends by itself; both at once, so that none stays for ever."""
        self._redis.eval(PUSH, 1, key, item, str(seconds))


class Bell:
    """The waiting side of the API: many requests wait at once on one event loop."""

    def __init__(self, redis_url: str) -> None:
        """Connect on first use."""
        self._redis = redis.asyncio.Redis.from_url(
            redis_url, socket_connect_timeout=1.0, socket_timeout=SOCKET_SECONDS
        )

    async def wait(self, completion_id: UUID, seconds: float) -> bool:
        """Wait until a Completion has ended, for at most `seconds`; tell whether it was rung.

        Raises one of BROKER_ERRORS when Redis is away.
        """
        key = f"{PREFIX}done:{completion_id.hex}"
        return await self._redis.blpop([key], timeout=seconds) is not None

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


def _bytes(item: object) -> bytes:
    assert isinstance(item, bytes)  # decode_responses is off
    return item
