"""Large bodies are worked on few at a time, and hold nobody else up."""

import asyncio
import threading

from app.kit.deps import work_on
from app.kit.ids import new_uuid
from app.kit.large_bodies import ACCOUNT, LARGE_BODY_BYTES, Line, placed

LARGE = b" " * (LARGE_BODY_BYTES + 1)
SMALL = b" " * LARGE_BODY_BYTES
AT_ONCE = 2
WAIT_SECONDS = 20


def test_no_more_large_bodies_than_allowed_are_worked_on_at_once() -> None:
    let_go = threading.Event()
    lock = threading.Lock()
    now, most = 0, 0
    begun = threading.Semaphore(0)
    line = Line(at_once=AT_ONCE, bytes_max=0, seconds=WAIT_SECONDS)

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        begun.release()
        assert let_go.wait(WAIT_SECONDS)
        with lock:
            now -= 1

    async def handle() -> None:
        account_id = new_uuid()
        with placed(line, {ACCOUNT: account_id}) as place:
            place.grow(len(LARGE))
            assert line.bytes_of(account_id) == len(LARGE)
            await work_on(LARGE, work)
            assert line.bytes_of(account_id) == 0, "what is answered later keeps no place"

    async def everything() -> None:
        large = [asyncio.create_task(handle()) for _ in range(5 * AT_ONCE)]
        for _ in range(AT_ONCE):
            await asyncio.to_thread(begun.acquire, timeout=WAIT_SECONDS)
        # All turns of large bodies are taken, and a small one goes through at once.
        assert await work_on(SMALL, lambda: "done") == "done"
        assert now == AT_ONCE
        let_go.set()
        await asyncio.gather(*large)

    asyncio.run(everything())
    assert most == AT_ONCE
    assert begun._value == 4 * AT_ONCE, "every body was worked on in the end"


def test_a_body_that_is_never_worked_on_leaves_nothing_behind() -> None:
    line = Line(at_once=AT_ONCE, bytes_max=0, seconds=WAIT_SECONDS)
    account_id = new_uuid()
    with placed(line, {ACCOUNT: account_id}) as place:
        place.grow(LARGE_BODY_BYTES)
        assert line.bytes_of(account_id) == 0
        place.grow(len(LARGE))
        place.grow(2 * len(LARGE))
        assert line.bytes_of(account_id) == 2 * len(LARGE)
    assert line.bytes_of(account_id) == 0
