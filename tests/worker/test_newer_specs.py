"""A worker that is older than the API runs nothing of what it does not know."""

import pytest

from tests.checker import check_everything
from tests.worker.conftest import shards

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
        assert bench.heartbeat.leases == 0, "the lease runs out"
    assert [shard["state"] for shard in shards(database)] == ["leased"]
    assert builders.job(job.id).n_running == 4
    (failure,) = [record for record in caplog.records if record.message == "shard failed"]
    assert "of_newer_code" in str(failure.exc_info[1])
    assert "newer one" in str(failure.exc_info[1])
    check_everything(database, bench.store)
