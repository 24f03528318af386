"""Groups of reproducible Jobs in a worker: alone, all at once, and whole or not at all."""

import asyncio
import io

import pyarrow.parquet as pq
import pytest

from app.completions.spec import RequestSpec, Sampling
from app.jobs.lifecycle import cancel_job
from app.jobs.records import LeasedShard
from tests.checker import check_everything
from tests.faults.stub_engine import FAILS, HANGS
from tests.fixtures.builders import a_spec
from tests.worker.conftest import ROOM, Bench
from worker.engine.protocol import Group
from worker.outcomes import Work
from worker.shard_run import groups_of

COLUMNS = ["request_index", "status", "engine", "engine_mode", "dtype", "model", "model_revision"]


def execute(database, query, *values):
    with database.transaction() as conn:
        conn.execute(query, values)


def shards(database, job):
    with database.transaction() as conn:
        rows = conn.execute(
            """
            SELECT first_index, end_index, state, attempt FROM shards
            WHERE job_id = %s ORDER BY first_index
            """,
            [job.id],
        ).fetchall()
    return [tuple(row.values()) for row in rows]


def rows_of(bench: Bench) -> list[dict]:
    found = []
    for path in bench.objects():
        if path.parent.name == "results":
            found += pq.read_table(io.BytesIO(path.read_bytes())).to_pylist()
    return sorted(found, key=lambda row: row["request_index"])


def test_choices_count_one_by_one_in_the_seats_of_a_group() -> None:
    shard = LeasedShard(
        id=1,
        job_id=None,  # type: ignore[arg-type]
        account_id=None,  # type: ignore[arg-type]
        first_index=4,
        end_index=7,
        lease_token=17,
        attempt=1,
        engine_deaths=0,
        reproducible=True,
    )
    work = [Work(4 + place, None, a_spec(n=n)) for place, n in enumerate((1, 3, 2))]
    groups = groups_of(shard, work)
    assert groups == [Group("17", 6, 0), Group("17", 6, 1), Group("17", 6, 4)]
    seats = [group.seat(i) for group, n in zip(groups, (1, 3, 2), strict=True) for i in range(n)]
    assert [seat.place for seat in seats] == [0, 1, 2, 3, 4, 5]


@pytest.mark.asyncio
async def test_a_group_starts_all_at_once_and_alone_and_the_next_one_after_it(
    bench_of, database, builders
):
    plain = builders.a_job(requests=4, shard_size=4)
    job = builders.a_job(account_id=plain.account_id, requests=40, shard_size=20, reproducible=True)
    async with bench_of() as bench:
        task = asyncio.create_task(bench.drain(shards_max=16).run())
        # The group is leased while the plain shard runs, and waits for it.
        await bench.until(lambda: builders.job(job.id).n_running == 20)
        await bench.until(lambda: bench.engine.running == 4)
        bench.engine.answer_those_that_run()
        await bench.until(lambda: bench.engine.running == 20)
        assert builders.job(plain.id).state == "completed"
        assert builders.job(job.id).n_running == 20, "the second group is not even leased"
        bench.engine.release()
        await task
        assert bench.engine.most == 20 > ROOM
    assert builders.job(job.id).state == "completed"
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_group_that_runs_when_its_job_is_paused_is_published_whole(
    bench_of, database, builders
):
    job = builders.a_job(requests=40, shard_size=20, reproducible=True)
    async with bench_of() as bench:
        run = bench.lease(builders)
        task = asyncio.create_task(run.run())
        await bench.until(lambda: bench.engine.running == 20)
        execute(database, "UPDATE jobs SET state = 'paused' WHERE id = %s", job.id)
        await bench.until(lambda: run.watch.pause)
        bench.engine.release()
        await task
    assert shards(database, job) == [(0, 20, "done", 1), (20, 40, "pending", 0)]
    assert builders.job(job.id).n_succeeded == 20
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_group_that_had_not_started_when_its_job_was_paused_waits_whole(
    bench_of, database, builders
):
    job = builders.a_job(requests=20, shard_size=20, reproducible=True)
    async with bench_of() as bench:
        run = bench.lease(builders)
        execute(database, "UPDATE jobs SET state = 'paused' WHERE id = %s", job.id)
        await bench.until(lambda: run.watch.pause)
        await run.run()
        assert bench.engine.most == 0
        assert bench.objects() == []
    assert shards(database, job) == [(0, 20, "pending", 0)]
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_group_that_a_stop_cuts_short_goes_back_whole_and_publishes_nothing(
    bench_of, database, builders
):
    """Some of its requests had ended; they will run again with the others."""
    specs = [a_spec()] * 5 + [RequestSpec((HANGS, 1), None, Sampling(max_tokens=2))] + [a_spec()]
    job = builders.a_job(specs=specs, shard_size=7, reproducible=True)
    async with bench_of() as bench:
        task = asyncio.create_task(bench.drain().run())
        bench.engine.release()
        await bench.until(lambda: bench.engine.requests_run == 6)
        bench.stopping.abort("told to stop now")
        await task
        assert bench.left_in_spool() == bench.objects() == []
        assert bench.heartbeat.leases == 0
    assert shards(database, job) == [(0, 7, "pending", 0)]
    assert builders.job(job.id).n_running == 0
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_cancel_keeps_what_a_group_had_finished(bench_of, database, builders):
    specs = [RequestSpec((HANGS, 1), None, Sampling(max_tokens=2)), *[a_spec()] * 6]
    job = builders.a_job(specs=specs, shard_size=7, reproducible=True)
    async with bench_of() as bench:
        task = asyncio.create_task(bench.drain().run())
        bench.engine.release()
        await bench.until(lambda: bench.engine.requests_run == 6)
        with database.transaction() as conn:
            cancel_job(conn, job.id)
        await task
        assert [row["status"] for row in rows_of(bench)] == ["cancelled"] + ["succeeded"] * 6
    assert builders.job(job.id).n_succeeded == 6
    check_everything(database, bench.store)


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.asyncio
async def test_every_row_says_which_engine_made_it_in_which_mode_and_dtype(
    bench_of, database, builders, reproducible
):
    """Rows of requests that succeeded, that erred and that were cancelled."""
    specs = [
        a_spec(),
        a_spec(n=1),
        RequestSpec((FAILS, 1), None, Sampling(max_tokens=2)),
        RequestSpec((HANGS, 1), None, Sampling(max_tokens=2)),
    ]
    job = builders.a_job(specs=specs, shard_size=4, reproducible=reproducible)
    async with bench_of() as bench:
        task = asyncio.create_task(bench.drain().run())
        bench.engine.release()
        await bench.until(lambda: bench.engine.running == 1)
        with database.transaction() as conn:
            cancel_job(conn, job.id)
        await task
        facts = bench.engine.facts
        rows = rows_of(bench)
    wanted = (facts.engine, facts.mode, facts.dtype, facts.model, facts.revision)
    assert [tuple(row[name] for name in COLUMNS) for row in rows] == [
        (0, "succeeded", *wanted),
        (1, "succeeded", *wanted),
        (2, "errored", *wanted),
        (3, "cancelled", *wanted),
    ]
    check_everything(database, bench.store)
