"""A room of limited size that accounts share: what does not fit waits outside, account by account.

Within an account it is first come, first served. Of several accounts that wait, the one that
holds least is next, and of equals the one that was served longest ago; so whoever asks for a lot
keeps others waiting for one leaving of its own at most. Nothing is ever taken away.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import UUID


@dataclass(slots=True, eq=False)
class _Waiter:
    amount: int
    turn: "asyncio.Future[None]"


class Shares:
    """The room; used on one event loop."""

    def __init__(self, total: int, account_max: int) -> None:
        """Hold `total` in all, and of one account `account_max` at most."""
        self._free = total
        self._account_max = min(account_max, total)
        self._held: Counter[UUID] = Counter()
        # Accounts in the order in which they were served, longest ago first.
        self._waiting: dict[UUID, deque[_Waiter]] = {}

    @asynccontextmanager
    async def taken(self, account_id: UUID, amount: int = 1) -> AsyncIterator[None]:
        """Wait for room and keep it for the length of the block.

        More than an account may have counts as all that it may have.
        """
        amount = min(amount, self._account_max)
        await self._take(account_id, amount)
        try:
            yield
        finally:
            self._give_back(account_id, amount)

    def held(self, account_id: UUID) -> int:
        """Say how much an account holds."""
        return self._held.get(account_id, 0)

    async def _take(self, account_id: UUID, amount: int) -> None:
        waiter = _Waiter(amount, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(account_id, deque()).append(waiter)
        self._serve()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.cancelled():
                self._serve()  # it may have stood in the way of others
            else:
                self._give_back(account_id, amount)
            raise

    def _give_back(self, account_id: UUID, amount: int) -> None:
        self._free += amount
        self._held[account_id] -= amount
        if not self._held[account_id]:
            del self._held[account_id]
        self._serve()

    def _serve(self) -> None:
        while (account_id := self._next()) is not None:
            waiters = self._waiting.pop(account_id)
            waiter = waiters.popleft()
            if waiters:
                self._waiting[account_id] = waiters  # now behind the others
            self._free -= waiter.amount
            self._held[account_id] += waiter.amount
            waiter.turn.set_result(None)

    def _next(self) -> UUID | None:
        """Choose whom to serve; None when nobody fits. Nobody overtakes one that needs more."""
        best: UUID | None = None
        for account_id in list(self._waiting):
            first = self._first(account_id)
            if first is None or self.held(account_id) + first.amount > self._account_max:
                continue
            if best is None or self.held(account_id) < self.held(best):
                best = account_id
        if best is None or self._waiting[best][0].amount > self._free:
            return None
        return best

    def _first(self, account_id: UUID) -> _Waiter | None:
        """Give an account's first waiter, without those that have given up."""
        waiters = self._waiting[account_id]
        while waiters and waiters[0].turn.cancelled():
            waiters.popleft()
        if not waiters:
            del self._waiting[account_id]
            return None
        return waiters[0]
