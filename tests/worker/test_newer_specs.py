"""A worker that is older than the API runs nothing of what it does not know."""

import pytest

from app.jobs.claims import claim_shards
from tests.checker import check_everything
from tests.worker.conftest import shards, states

PLACES = ["{of_newer_code}", "{sampling,of_newer_code}"]


@pytest.mark.asyncio
@pytest.mark.parametrize("place", PLACES)
async def test_a_shard_of_newer_code_is_left_for_a_newer_worker(
    bench_of, database, builders, caplog, place
):
    job = builders.a_job(requests=4, shard_size=4)
    with database.transaction() as conn:
        conn.execute(
            """
            UPDATE requests SET spec = jsonb_set(spec, %s, 'true') WHERE request_index = 2
            """,
            [place],
        )
    async with bench_of() as bench:
        bench.engine.release()
        await bench.drain().run()
        assert bench.engine.requests_run == 0, "not even its neighbours: a shard is one part"
        assert bench.left_in_spool() == bench.objects() == []
        assert bench.heartbeat.leases == 0
        await bench.drain().run()
    assert states(database) == [(0, 4, "pending", 0)]
    assert builders.job(job.id).n_running == 0
    for failure in _left_to_newer(caplog):
        assert "of_newer_code" in str(failure.exc_info[1])
        assert "newer one" in str(failure.exc_info[1])
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_worker_that_cannot_read_a_job_tries_once_and_runs_the_others(
    bench_of, database, builders, caplog
):
    """It would lease the same shard for ever, or each failed lease would split it."""
    newer = builders.a_job(requests=8, shard_size=4)
    _of_newer_code(database, newer)
    plain = builders.a_job(requests=4, shard_size=4)
    async with bench_of() as bench:
        bench.engine.release()
        drain = bench.drain(shards_max=1)
        await drain.run()
        await drain.run()
        assert bench.engine.requests_run == 4
    assert len(_left_to_newer(caplog)) == 1
    assert builders.job(plain.id).state == "completed"
    assert [shard["attempt"] for shard in shards(database) if shard["state"] == "pending"] == [0, 0]
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_job_that_could_not_be_read_is_not_bound_to_the_old_engine(
    bench_of, database, builders
):
    job = builders.a_job(requests=4, shard_size=4)
    _of_newer_code(database, job)
    async with bench_of() as bench:
        await bench.drain().run()
    worker = builders.a_worker(engine="stub 2.0")
    with database.transaction() as conn:
        (shard,) = claim_shards(conn, worker, lease_seconds=60, shards_max=9)
    assert (shard.job_id, shard.attempt, shard.end_index) == (job.id, 1, 4)
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_job_of_which_something_ran_stays_with_its_engine(bench_of, database, builders):
    job = builders.a_job(requests=8, shard_size=4)
    async with bench_of() as bench:
        bench.engine.release()
        await bench.lease(builders).run()
        _of_newer_code(database, job, index=5)
        await bench.drain().run()
        assert bench.engine.requests_run == 4
    assert builders.job(job.id).engine == bench.identity.engine
    check_everything(database, bench.store)


def _of_newer_code(database, job, *, index=0):
    with database.transaction() as conn:
        conn.execute(
            """
            UPDATE requests SET spec = jsonb_set(spec, '{of_newer_code}', 'true')
            WHERE job_id = %s AND request_index = %s
            """,
            [job.id, index],
        )


def _left_to_newer(caplog):
    message = "shard left to a newer worker"
    return [record for record in caplog.records if record.message == message]
