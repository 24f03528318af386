"""Large bodies of one process: whose turn it is to be worked on, and who must come back later.

Until it has been read, a large body takes up to ten times its size in memory, and a processor for
up to minutes. So few are worked on at once, of one account one at a time, and accounts take turns:
whoever sends a lot keeps everybody else waiting for one body, not for all of its own. What waits
lies in memory whole, so an account may have so many bytes in a line and no more, counted before
they arrive, and nothing waits for ever. Small bodies pass by and are not counted.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, Final
from uuid import UUID

from app.errors import TooManyRequestsError

LARGE_BODY_BYTES: Final = 1024 * 1024
RETRY_AFTER_SECONDS: Final = 10
ACCOUNT: Final = "account_id"  # where app/accounts/access.py leaves it in the request's state


class Line:
    """A line of large bodies; used on one event loop."""

    def __init__(self, *, at_once: int, bytes_max: int, seconds: float) -> None:
        """Work on `at_once` bodies; keep `bytes_max` of an account, and none waiting longer."""
        self._at_once = at_once
        self._bytes_max = bytes_max
        self._seconds = seconds
        self._bytes: Counter[UUID | None] = Counter()
        self._working: set[UUID | None] = set()
        # Accounts in the order in which they had a turn, longest ago first.
        self._waiting: dict[UUID | None, deque[asyncio.Future[None]]] = {}

    def bytes_of(self, account_id: UUID | None) -> int:
        """Say how many bytes of an account are here."""
        return self._bytes.get(account_id, 0)

    def hold(self, account_id: UUID | None, size: int, *, before: int) -> None:
        """Count a body that has grown from `before` to `size` bytes; an account may have one.

        Raises TooManyRequestsError (intake_full) for a further one that is over the limit.
        """
        others = self.bytes_of(account_id) - before
        if others and others + size > self._bytes_max:
            msg = (
                f"Bodies of {others} bytes of this account wait here to be read through; with this "
                f"one of {size} they were more than {self._bytes_max} (large_bodies_bytes in GET "
                "/v1/limits; bodies up to 1 MiB do not count). Nothing was stored. Wait for the "
                "answer to one of them and send this one again."
            )
            raise _full(msg)
        self._bytes[account_id] += size - before

    def give_back(self, account_id: UUID | None, size: int) -> None:
        """Forget a body of `size` bytes."""
        self._bytes[account_id] -= size
        if not self._bytes[account_id]:
            del self._bytes[account_id]

    @asynccontextmanager
    async def turn(self, account_id: UUID | None) -> AsyncIterator[None]:
        """Wait for a turn and keep it for the length of the block.

        Raises TooManyRequestsError (intake_full) when it does not come in time.
        """
        try:
            async with asyncio.timeout(self._seconds):
                await self._take(account_id)
        except TimeoutError:
            msg = (
                f"The turn of this body did not come within {self._seconds} s (large_body_seconds "
                "in GET /v1/limits): other large ones were before it, and one of an account is "
                "worked on at a time. Nothing was stored. Send it again."
            )
            raise _full(msg) from None
        try:
            yield
        finally:
            self._end(account_id)

    async def _take(self, account_id: UUID | None) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account_id, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(account_id, turn)
            else:
                self._end(account_id)  # it came just now
            raise

    def _end(self, account_id: UUID | None) -> None:
        self._working.remove(account_id)
        self._serve()

    def _forget(self, account_id: UUID | None, turn: "asyncio.Future[None]") -> None:
        waiting = self._waiting[account_id]
        waiting.remove(turn)
        if not waiting:
            del self._waiting[account_id]

    def _serve(self) -> None:
        for account_id in [name for name in self._waiting if name not in self._working]:
            # One that was cancelled takes itself out.
            turn = next((each for each in self._waiting[account_id] if not each.done()), None)
            if turn is None:
                continue
            if len(self._working) >= self._at_once:
                return
            self._working.add(account_id)
            self._forget(account_id, turn)
            if account_id in self._waiting:
                self._waiting[account_id] = self._waiting.pop(account_id)  # now behind the others
            turn.set_result(None)


class Place:
    """What the body of one request takes of its line: nothing while it is small."""

    def __init__(self, line: Line, state: MutableMapping[str, Any]) -> None:
        """Prepare; the account is looked up in `state` when the body turns out to be large."""
        self._line = line
        self._state = state
        self._account_id: UUID | None = None
        self._size = 0

    def grow(self, size: int) -> None:
        """Say that the body has `size` bytes. Raises TooManyRequestsError (intake_full)."""
        if size <= max(self._size, LARGE_BODY_BYTES):
            return
        if not self._size:
            self._account_id = self._state.get(ACCOUNT)
        self._line.hold(self._account_id, size, before=self._size)
        self._size = size

    def leave(self) -> None:
        """Free what was taken; may be called again."""
        if self._size:
            self._line.give_back(self._account_id, self._size)
            self._size = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the body's turn; after the block it has left the line."""
        try:
            async with self._line.turn(self._account_id):
                yield
        finally:
            self.leave()


_PLACE: ContextVar[Place] = ContextVar("the place of the request's body")


@contextmanager
def placed(line: Line, state: MutableMapping[str, Any]) -> Iterator[Place]:
    """Give the request that is handled inside a place in a line; what is left of it is freed."""
    place = Place(line, state)
    token = _PLACE.set(place)
    try:
        yield place
    finally:
        _PLACE.reset(token)
        place.leave()


@asynccontextmanager
async def turn_of_body(size: int) -> AsyncIterator[None]:
    """Wait until the body of the request that is handled here may be worked on.

    Raises TooManyRequestsError (intake_full) when that does not come in time.
    """
    if size <= LARGE_BODY_BYTES:
        yield
        return
    async with _PLACE.get().turn():
        yield


def _full(message: str) -> TooManyRequestsError:
    return TooManyRequestsError(message, code="intake_full", retry_after=RETRY_AFTER_SECONDS)
