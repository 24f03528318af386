"""An object store that goes away and comes back: what was computed waits, and nothing is split."""

import asyncio

import pytest

from app.jobs.lifecycle import cancel_job
from tests.checker import check_everything
from tests.worker.conftest import states
from worker.part_writer import StoreAwayError


@pytest.mark.asyncio
async def test_finished_parts_wait_for_the_store_and_no_request_runs_twice(
    bench_of, database, builders
):
    job = builders.a_job(requests=8, shard_size=4)
    async with bench_of() as bench:
        task = await bench.start_without_store(bench.drain().run(), parts=2)
        assert states(database) == [(0, 4, "leased", 1), (4, 8, "leased", 1)]
        bench.bring_store_back()
        await task
        assert bench.left_in_spool() == []
        assert bench.engine.requests_run == 8
    assert builders.job(job.id).state == "completed"
    assert states(database) == [(0, 4, "done", 1), (4, 8, "done", 1)]
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_store_that_stays_away_gives_shards_back_whole_and_stops_leasing(
    bench_of, database, builders
):
    job = builders.a_job(requests=8, shard_size=2)
    async with bench_of() as bench:
        bench.take_store_away()
        bench.engine.release()
        drain = bench.drain(shards_max=1, store_patience_seconds=0.0)
        await asyncio.wait_for(drain.run(), 20)
        assert states(database) == [(at, at + 2, "pending", 0) for at in (0, 2, 4, 6)]
        assert bench.engine.requests_run == 2, (
            "the second shard was leased while nothing can be published"
        )
        await drain.run()
        assert bench.engine.requests_run == 2
        assert bench.heartbeat.leases == 0
        assert bench.left_in_spool() == []
        assert builders.job(job.id).n_running == 0
        bench.bring_store_back()
        await drain.run()
    assert builders.job(job.id).state == "completed"
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_worker_that_stops_meanwhile_gives_its_shard_back(bench_of, database, builders):
    builders.a_job(requests=4, shard_size=4)
    async with bench_of() as bench:
        task = await bench.start_without_store(bench.drain().run())
        bench.stopping.abort("its time is over")
        await task
        assert bench.left_in_spool() == []
    assert states(database) == [(0, 4, "pending", 0)]


@pytest.mark.asyncio
async def test_a_lease_lost_meanwhile_leaves_nothing_behind(bench_of, database, builders):
    builders.a_job(requests=4, shard_size=4)
    async with bench_of() as bench:
        run = bench.lease(builders)
        task = await bench.start_without_store(run.run())
        with database.transaction() as conn:
            conn.execute(
                "UPDATE shards SET state = 'pending', lease_token = NULL, worker_id = NULL,"
                " lease_expires_at = NULL"
            )
            conn.execute("UPDATE jobs SET n_running = 0")
        with pytest.raises(StoreAwayError):
            await task
        assert run.watch.lost
        bench.bring_store_back()
        assert bench.left_in_spool() == bench.objects() == []
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_job_cancelled_meanwhile_keeps_what_was_computed(bench_of, database, builders):
    job = builders.a_job(requests=4, shard_size=4)
    async with bench_of() as bench:
        task = await bench.start_without_store(bench.drain().run())
        with database.transaction() as conn:
            cancel_job(conn, job.id)
        bench.bring_store_back()
        await task
    ended = builders.job(job.id)
    assert (ended.n_succeeded, ended.tokens_held) == (4, 0)
    check_everything(database, bench.store)
