"""Large bodies are worked on few at a time, and hold nobody else up."""

import asyncio
import threading

from app.kit.deps import LARGE_AT_ONCE, LARGE_BODY_BYTES, work_on

LARGE = b" " * (LARGE_BODY_BYTES + 1)
SMALL = b" " * LARGE_BODY_BYTES
WAIT_SECONDS = 20


def test_no_more_large_bodies_than_allowed_are_worked_on_at_once() -> None:
    let_go = threading.Event()
    lock = threading.Lock()
    now, most = 0, 0
    begun = threading.Semaphore(0)

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        begun.release()
        assert let_go.wait(WAIT_SECONDS)
        with lock:
            now -= 1

    async def everything() -> None:
        large = [asyncio.create_task(work_on(LARGE, work)) for _ in range(5 * LARGE_AT_ONCE)]
        for _ in range(LARGE_AT_ONCE):
            await asyncio.to_thread(begun.acquire, timeout=WAIT_SECONDS)
        # All places of large bodies are taken, and a small one goes through at once.
        assert await work_on(SMALL, lambda: "done") == "done"
        assert now == LARGE_AT_ONCE
        let_go.set()
        await asyncio.gather(*large)

    asyncio.run(everything())
    assert most == LARGE_AT_ONCE
    assert begun._value == 4 * LARGE_AT_ONCE, "every body was worked on in the end"
