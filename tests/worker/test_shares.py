"""A room that accounts share: how much each gets, and who is next."""

import asyncio
import contextlib
from uuid import UUID

from worker.shares import Shares

A, B, C = (UUID(int=number) for number in range(1, 4))


class Room:
    """Shares and those who want some; `inside` is who came in, in that order."""

    def __init__(self, total: int, account_max: int) -> None:
        self.shares = Shares(total, account_max)
        self.inside: list[str] = []
        self.present: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    def want(self, name: str, account_id: UUID, amount: int = 1) -> None:
        self._leave[name] = asyncio.Event()
        self.present[name] = asyncio.ensure_future(self._stay(name, account_id, amount))

    async def _stay(self, name: str, account_id: UUID, amount: int) -> None:
        async with self.shares.taken(account_id, amount):
            self.inside.append(name)
            await self._leave[name].wait()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._leave[name].set()
            await self.present[name]
        await settled()

    async def give_up(self, name: str) -> None:
        self.present[name].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.present[name]
        await settled()


async def settled() -> None:
    """Let everybody come in who can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_an_account_alone_gets_its_share_and_no_more():
    async def main() -> list[str]:
        room = Room(total=4, account_max=3)
        for number in range(6):
            room.want(f"a{number}", A)
        await settled()
        assert room.shares.held(A) == 3
        room.want("b0", B)
        await settled()
        await room.leave("a1")
        return room.inside

    assert asyncio.run(main()) == ["a0", "a1", "a2", "b0", "a3"]


def test_who_holds_least_is_next_and_equals_take_turns():
    async def main() -> list[str]:
        room = Room(total=3, account_max=3)
        for name, account in (("a0", A), ("a1", A), ("a2", A), ("a3", A), ("a4", A)):
            room.want(name, account)
        for name, account in (("b0", B), ("b1", B), ("c0", C), ("c1", C)):
            room.want(name, account)
        await settled()
        await room.leave("a0", "a1", "a2", "b0", "c0", "a3")
        return room.inside

    assert asyncio.run(main()) == ["a0", "a1", "a2", "b0", "c0", "a3", "b1", "c1", "a4"]


def test_what_needs_much_is_not_overtaken_and_more_than_all_counts_as_all():
    async def main() -> list[str]:
        room = Room(total=10, account_max=6)
        room.want("a0", A, 5)
        room.want("b0", B, 1000)
        await settled()
        assert room.inside == ["a0"], "6 do not fit beside 5"
        room.want("c0", C, 6)
        await settled()
        await room.leave("a0")
        assert room.shares.held(B) == 6
        await room.leave("b0")
        assert (room.shares.held(B), room.shares.held(C)) == (0, 6)
        return room.inside

    assert asyncio.run(main()) == ["a0", "b0", "c0"]


def test_one_that_gives_up_leaves_nothing_behind():
    async def main() -> list[str]:
        room = Room(total=4, account_max=4)
        room.want("a0", A, 3)
        room.want("b0", B, 4)
        room.want("c0", C, 1)
        await settled()
        assert room.inside == ["a0"]
        await room.give_up("b0")  # it stood in the way
        assert room.inside == ["a0", "c0"]
        await room.give_up("a0")
        room.want("b1", B, 2)
        await settled()
        room.present["b1"].cancel()
        await room.leave("c0")
        room.want("a1", A, 4)
        await settled()
        return room.inside

    assert asyncio.run(main()) == ["a0", "c0", "b1", "a1"]


def test_a_turn_that_comes_with_the_cancel_is_given_back():
    async def main() -> None:
        room = Room(total=1, account_max=1)

        async def leave_and_cancel() -> None:
            async with room.shares.taken(A):
                room.want("b0", B)
                await settled()
            room.present["b0"].cancel()  # it has its turn now, and has not run

        await leave_and_cancel()
        room.want("c0", C)
        await settled()
        assert room.inside == ["c0"]
        assert room.shares.held(B) == 0

    asyncio.run(main())
