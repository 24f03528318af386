"""An engine that dies while finished parts wait for the store: noticed, and not blamed on them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest

from tests.checker import check_everything
from tests.worker.conftest import ROOM, states
from worker.engine.protocol import EngineDeadError
from worker.shard_run import Shop


@pytest.mark.asyncio
async def test_an_engine_that_dies_behind_waiting_parts_is_noticed_and_they_are_published(
    bench_of, database, builders
):
    job = builders.a_job(requests=8, shard_size=4)
    async with bench_of() as bench:
        task = await bench.start_without_store(bench.drain().run(), parts=2)
        bench.engine.die()
        await bench.until(lambda: bench.stopping.is_soft)
        assert not task.done(), "what was computed may still be published"
        bench.bring_store_back()
        with pytest.raises(EngineDeadError):
            await task
        assert bench.heartbeat.leases == 0
    assert states(database, deaths=True) == [(0, 4, "done", 1, 0), (4, 8, "done", 1, 0)]
    assert builders.job(job.id).n_succeeded == 8
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_waiting_parts_of_a_dead_engine_are_given_back_whole_when_the_time_is_over(
    bench_of, database, builders
):
    builders.a_job(requests=8, shard_size=4)
    async with bench_of() as bench:
        task = await bench.start_without_store(bench.drain().run(), parts=2)
        bench.engine.die()
        await bench.until(lambda: bench.stopping.is_soft)
        bench.stopping.abort("its time is over")
        with pytest.raises(EngineDeadError):
            await task
        assert bench.heartbeat.leases == 0
        assert bench.left_in_spool() == []
        bench.bring_store_back()
    assert states(database, deaths=True) == [(0, 4, "pending", 0, 0), (4, 8, "pending", 0, 0)]
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_only_what_the_dead_engine_had_is_suspected(bench_of, database, builders):
    """The first shard waits for the store, the second runs, the third waits for room."""
    job = builders.a_job(requests=20, shard_size=ROOM)
    async with bench_of() as bench:
        bench.take_store_away()
        task = asyncio.create_task(bench.drain().run())
        await bench.until(lambda: bench.engine.running == ROOM)
        bench.engine.answer_those_that_run()
        await bench.until(lambda: bench.parts_refused == 1 and bench.engine.running == ROOM)
        await bench.until(lambda: builders.job(job.id).n_running == 20)
        bench.engine.die()
        bench.engine.release()
        await bench.until(lambda: bench.stopping.is_soft)
        bench.bring_store_back()
        with pytest.raises(EngineDeadError):
            await task
        assert bench.heartbeat.leases == 0
        assert bench.left_in_spool() == []
    assert states(database, deaths=True) == [
        (0, 8, "done", 1, 0),
        (8, 12, "pending", 1, 1),
        (12, 16, "pending", 1, 1),
        (16, 20, "pending", 0, 0),
    ]
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_what_has_to_be_done_in_any_case_is_done_before_a_cancellation_is_raised():
    gate, done = threading.Event(), []
    with ThreadPoolExecutor(1) as threads:
        shop = Shop(**{**dict.fromkeys(field.name for field in fields(Shop)), "threads": threads})
        threads.submit(gate.wait, 30)  # the only thread is busy: the work waits in its line
        task = asyncio.create_task(shop.surely(lambda: done.append("cleaned up")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert done == ["cleaned up"]
