"""What a stream begins with: read after it was asked for, so that a page never goes back."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from anyio import CapacityLimiter

from app.admin import live, workers
from app.admin.followed import Context, Followed
from app.admin.live import Streams
from app.kit.db import Conn
from app.kit.ids import public_id
from tests.admin.pages import test_live
from tests.admin.pages.test_live import events, next_event, person
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders

address = test_live.address
WORKERS = "/admin/live?page=workers"


@pytest.fixture
def long_shared(monkeypatch):
    """What was read is shared for longer than a test lasts."""
    monkeypatch.setattr(live, "SHARED_SECONDS", 600.0)


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Each read of the page of workers, as streams make them."""
    read, made = workers._read, []

    def count_and_read(conn: Conn) -> Context:
        made.append("workers")
        return read(conn)

    monkeypatch.setattr(workers, "_read", count_and_read)
    return made


def test_a_page_of_an_account_does_not_go_back_to_what_was_before_an_act(
    dashboard: Dashboard, address, long_shared
):
    account = public_id("acct", Builders(dashboard.database).an_account())
    path = f"/admin/live?page=account&account={account}"
    with person(dashboard, address) as client, client.stream("GET", path) as before:
        next_event(events(before), "stopped")
        answer = client.post(f"/admin/accounts/{account}/holds/stop", data={"reason": "odd"})
        assert answer.status_code == 303
        with client.stream("GET", path) as after:
            assert "places no new Holds" in next_event(events(after), "stopped")


def test_the_system_page_does_not_go_back_to_what_was_before_a_check(dashboard: Dashboard, address):
    path = "/admin/live?page=system"
    with person(dashboard, address) as client, client.stream("GET", path) as before:
        assert "Not checked yet" in next_event(events(before), "invariants")
        assert client.post("/admin/system/invariants").status_code == 303
        with client.stream("GET", path) as after:
            assert "all true" in next_event(events(after), "invariants")


def test_one_read_serves_the_whole_beginning_of_a_stream(
    dashboard: Dashboard, address, reads, monkeypatch
):
    monkeypatch.setattr(live, "SHARED_SECONDS", 0.0)
    monkeypatch.setattr(live, "LOOK_SECONDS", 30.0)
    with person(dashboard, address) as client, client.stream("GET", WORKERS) as answer:
        stream = events(answer)
        assert {next(stream)[0] for _ in workers.PIECES} == set(workers.PIECES)
        assert len(reads) == 1


def test_what_streams_look_at_later_is_read_once_for_all_of_them(
    dashboard: Dashboard, address, reads, long_shared, monkeypatch
):
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(live, "QUIET_SECONDS", 0.05)
    with (
        person(dashboard, address) as client,
        client.stream("GET", WORKERS) as one,
        client.stream("GET", WORKERS) as other,
    ):
        for answer in (one, other):
            lines = answer.iter_lines()
            for _ in range(2):  # so each has looked again, and more than once
                assert until_quiet(lines)
    assert len(reads) == 2  # the beginning of each


def until_quiet(lines: Iterator[str]) -> bool:
    return any(line.startswith(": still here") for line in lines)


def test_who_comes_while_a_read_waits_for_its_thread_shares_it(dashboard: Dashboard, long_shared):
    made: list[int] = []

    def read(_conn: Conn) -> Context:
        made.append(len(made))
        return {"number": made[-1]}

    page = Followed(key="a page", read=read, pieces={})

    async def come() -> None:
        loop, free = asyncio.get_running_loop(), threading.Event()
        streams = Streams(threads=CapacityLimiter(1))

        def look(not_before: float) -> asyncio.Task[Context | None]:
            return loop.create_task(streams.look(page, dashboard.database, not_before=not_before))

        busy = loop.create_task(streams.call(free.wait))
        try:
            early = [look(loop.time()) for _ in range(3)]
            await asyncio.sleep(0)  # they have asked now, and wait
            early.append(look(loop.time()))
        finally:
            free.set()
        assert await asyncio.gather(*early) == [{"number": 0}] * 4
        assert await look(loop.time()) == {"number": 1}
        assert await look(0.0) == {"number": 1}
        await busy

    asyncio.run(come())
    assert made == [0, 1]
