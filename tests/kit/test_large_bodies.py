"""The line of large bodies: turns by account, so many bytes of one, and nobody for ever."""

import asyncio
from uuid import UUID

import pytest

from app.errors import TooManyRequestsError
from app.kit.ids import new_uuid
from app.kit.large_bodies import Line

WAIT_SECONDS = 20.0


class Bodies:
    """Bodies that are worked on until they are let go."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._doors: dict[str, asyncio.Event] = {}

    async def come(self, account_id: UUID, *names: str) -> None:
        """Put bodies of an account in line, in this order."""
        for name in names:
            self._doors[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._work(account_id, name))
        await self.settle()

    async def end(self, *names: str) -> None:
        """Let the work on these end, one after the other."""
        for name in names:
            self._doors[name].set()
            await self.tasks[name]
            await self.settle()

    async def settle(self) -> None:
        """Let everybody take the steps that can be taken."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def _work(self, account_id: UUID, name: str) -> None:
        async with self.line.turn(account_id):
            self.begun.append(name)
            await self._doors[name].wait()


def a_line(*, at_once: int = 2, bytes_max: int = 100, seconds: float = WAIT_SECONDS) -> Line:
    return Line(at_once=at_once, bytes_max=bytes_max, seconds=seconds)


def test_an_account_with_many_keeps_others_waiting_for_one_of_its_own() -> None:
    async def everything() -> None:
        bodies = Bodies(a_line(at_once=1))
        much, little, other = new_uuid(), new_uuid(), new_uuid()
        await bodies.come(much, "m1", "m2", "m3", "m4")
        await bodies.come(little, "l1", "l2")
        await bodies.come(other, "o1")
        assert bodies.begun == ["m1"]
        await bodies.end("m1", "m2", "l1", "o1", "m3", "l2", "m4")
        assert bodies.begun == ["m1", "m2", "l1", "o1", "m3", "l2", "m4"]

    asyncio.run(everything())


def test_one_of_an_account_is_worked_on_at_a_time_and_so_many_in_all() -> None:
    async def everything() -> None:
        bodies = Bodies(a_line(at_once=2))
        one, two, three = new_uuid(), new_uuid(), new_uuid()
        await bodies.come(one, "a1", "a2")
        assert bodies.begun == ["a1"], "the second turn is for others"
        await bodies.come(two, "b1")
        await bodies.come(three, "c1")
        assert bodies.begun == ["a1", "b1"]
        await bodies.end("b1")
        assert bodies.begun == ["a1", "b1", "c1"]
        await bodies.end("a1", "a2", "c1")

    asyncio.run(everything())


def test_one_that_leaves_while_it_waits_leaves_no_gap() -> None:
    async def everything() -> None:
        bodies = Bodies(a_line(at_once=1))
        one, two = new_uuid(), new_uuid()
        await bodies.come(one, "a1", "a2", "a3")
        await bodies.come(two, "b1")
        bodies.tasks["a2"].cancel()
        bodies.tasks["b1"].cancel()
        await bodies.end("a1", "a3")
        assert bodies.begun == ["a1", "a3"]
        await bodies.come(two, "b2")
        await bodies.end("b2")

    asyncio.run(everything())


def test_one_that_leaves_at_the_moment_of_its_turn_gives_it_on() -> None:
    async def everything() -> None:
        bodies = Bodies(a_line(at_once=1))
        one, two = new_uuid(), new_uuid()
        async with bodies.line.turn(one):
            await bodies.come(two, "b1", "b2")
        bodies.tasks["b1"].cancel()  # the turn is b1's, who has not woken up yet
        await bodies.settle()
        assert bodies.begun == ["b2"]
        await bodies.end("b2")

    asyncio.run(everything())


def test_one_whose_turn_does_not_come_in_time_is_told_and_forgotten() -> None:
    async def everything() -> None:
        line = a_line(at_once=1, seconds=0.05)
        bodies = Bodies(line)
        one, two = new_uuid(), new_uuid()
        await bodies.come(one, "a1", "a2")
        with pytest.raises(TooManyRequestsError, match=r"within 0\.05 s") as refused:
            await bodies.tasks["a2"]
        assert (refused.value.code, refused.value.status) == ("intake_full", 429)
        assert refused.value.retry_after
        await bodies.end("a1")
        await bodies.come(two, "b1")
        await bodies.end("b1")
        assert bodies.begun == ["a1", "b1"]

    asyncio.run(everything())


def test_an_account_may_have_so_many_bytes_and_one_body_in_any_case() -> None:
    line = a_line(bytes_max=100)
    mine, other = new_uuid(), new_uuid()
    line.hold(mine, 150, before=0)
    line.hold(mine, 160, before=150)
    with pytest.raises(TooManyRequestsError, match="160 bytes of this account") as refused:
        line.hold(mine, 10, before=0)
    assert refused.value.code == "intake_full"
    line.hold(other, 60, before=0)
    line.hold(other, 40, before=0)
    with pytest.raises(TooManyRequestsError):
        line.hold(other, 41, before=40)
    line.give_back(mine, 160)
    assert line.bytes_of(mine) == 0
    line.hold(mine, 100, before=0)
