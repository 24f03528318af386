"""A shard's run under pause, cancel, a lost lease and a failing part; several at once."""

import asyncio
from dataclasses import replace

import psycopg
import pytest

from app.jobs.lifecycle import cancel_job
from app.steering.spec import FOREVER, Capture, Direction, Reduce, Site
from tests.checker import check_everything
from tests.fixtures.builders import a_spec
from tests.worker.conftest import ROOM, shards, states
from worker.part_writer import PartWriter


def execute(database, query, *values):
    with database.transaction() as conn:
        conn.execute(query, values)


@pytest.mark.asyncio
async def test_a_pause_lets_what_runs_finish_and_gives_the_rest_back(bench_of, database, builders):
    job = builders.a_job(requests=20, shard_size=20)
    async with bench_of() as bench:
        run = bench.lease(builders)
        task = asyncio.create_task(run.run())
        await bench.until(lambda: bench.engine.running == ROOM)
        execute(database, "UPDATE jobs SET state = 'paused' WHERE id = %s", job.id)
        await bench.until(lambda: run.watch.pause)
        bench.engine.release()
        await task
    assert states(database) == [
        (0, ROOM, "done", 1),
        (ROOM, 20, "pending", 0),
    ]
    assert builders.job(job.id).n_succeeded == ROOM
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_cancel_aborts_what_runs_and_releases_its_holds(bench_of, database, builders):
    job = builders.a_job(requests=20, shard_size=20)
    async with bench_of() as bench:
        run = bench.lease(builders)
        task = asyncio.create_task(run.run())
        await bench.until(lambda: bench.engine.running == ROOM)
        with database.transaction() as conn:
            cancel_job(conn, job.id)
        await task
        assert bench.engine.running == 0
    ended = builders.job(job.id)
    assert (ended.state, ended.n_cancelled, ended.tokens_held) == ("cancelled", 20, 0)
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_an_outcome_on_its_way_into_the_part_survives_a_cancel(
    bench_of, database, builders, monkeypatch
):
    """The engine gave it before the cancel was seen: it is kept and charged, once."""
    job = builders.a_job(requests=3, shard_size=3)
    adding = asyncio.Event()
    async with bench_of() as bench:
        loop = asyncio.get_running_loop()
        run = bench.lease(builders)
        add = PartWriter.add

        def slow_add(part, *args, **kwargs):
            loop.call_soon_threadsafe(adding.set)
            asyncio.run_coroutine_threadsafe(bench.until(lambda: run.watch.cancel), loop).result()
            return add(part, *args, **kwargs)

        monkeypatch.setattr(PartWriter, "add", slow_add)
        bench.engine.release()
        task = asyncio.create_task(run.run())
        await adding.wait()
        with database.transaction() as conn:
            cancel_job(conn, job.id)
        await task
    assert builders.job(job.id).n_succeeded == 3
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_lost_lease_ends_the_run_and_leaves_nothing(bench_of, database, builders):
    builders.a_job(requests=20, shard_size=20)
    async with bench_of() as bench:
        run = bench.lease(builders)
        task = asyncio.create_task(run.run())
        await bench.until(lambda: bench.engine.running == ROOM)
        execute(
            database,
            """
            UPDATE shards SET state = 'pending', lease_token = NULL, lease_expires_at = NULL,
                worker_id = NULL
            """,
        )
        execute(database, "UPDATE jobs SET n_running = 0")
        await task
        assert run.watch.lost
        assert bench.engine.running == 0
        assert bench.left_in_spool() == bench.objects() == []
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_part_that_cannot_be_written_fails_the_shard_and_leaves_nothing(
    bench_of, database, builders, monkeypatch
):
    builders.a_job(requests=20, shard_size=20)

    def full_disk(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    async with bench_of() as bench:
        run = bench.lease(builders)
        monkeypatch.setattr(PartWriter, "add", full_disk)
        bench.engine.release()
        with pytest.raises(OSError, match="No space"):
            await run.run()
        assert bench.engine.running == 0
        assert not bench.shop.room.locked()
        assert bench.left_in_spool() == bench.objects() == []
    assert [row["state"] for row in shards(database)] == ["leased"]
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_result_that_cannot_be_written_errors_its_request_alone(
    bench_of, database, builders, monkeypatch
):
    """Its Hold is released; before, it stopped its shard, which was leased again for ever."""
    job = builders.a_job(requests=4, shard_size=4)
    async with bench_of() as bench:
        run = bench.lease(builders)
        ask = bench.engine.run

        async def answer(key, spec, **options):
            outcome = await ask(key, spec, **options)
            if key.endswith(".2"):
                choice = replace(outcome.choices[0], text="half \ud800 a sign")
                outcome = replace(outcome, choices=(choice,))
            return outcome

        monkeypatch.setattr(bench.engine, "run", answer)
        bench.engine.release()
        await run.run()
    ended = builders.job(job.id)
    assert (ended.n_succeeded, ended.n_errored, ended.tokens_held) == (3, 1, 0)
    with database.transaction() as conn:
        row = conn.execute(
            "SELECT state, error_code FROM requests WHERE job_id = %s AND request_index = 2",
            [job.id],
        ).fetchone()
    assert row == {"state": "errored", "error_code": "result_not_writable"}
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_captures_of_every_kind_are_published(bench_of, database, builders):
    def capture(name, reduce, **fields):
        return Capture(name, Site.resid_post, (0, 1), reduce=reduce, **fields)

    captures = (
        capture("rows", Reduce.none, spans=((1, 3), (6, FOREVER))),
        capture("mean", Reduce.mean, spans=((1, 3),)),
        capture("norm", Reduce.norm, before=True),
        capture("scores", Reduce.project, directions=(Direction("sv_" + "0" * 64),)),
    )
    specs = [replace(a_spec(), captures=captures)] * 3
    job = builders.a_job(specs=specs, shard_size=2)
    async with bench_of() as bench:
        bench.engine.release()
        for _ in range(2):
            await bench.lease(builders).run()
    assert builders.job(job.id).n_succeeded == 3
    with database.transaction() as conn:
        rows = conn.execute(
            """
            SELECT capture, layer, reduce, before, sum(rows)::int AS rows FROM result_files
            WHERE job_id = %s AND kind = 'captures' GROUP BY 1, 2, 3, 4 ORDER BY 1, 2
            """,
            [job.id],
        ).fetchall()
    ran = a_spec().prompt_tokens + a_spec().sampling.max_tokens - 1
    assert [tuple(row.values()) for row in rows] == [
        (name, layer, reduce, name == "norm", 3 * count)
        for name, reduce, count in (
            ("mean", "mean", 1),
            ("norm", "norm", ran),
            ("rows", "none", 2 + ran - 6),
            ("scores", "project", ran),
        )
        for layer in (0, 1)
    ]
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_shards_stream_through_one_engine_that_never_has_too_many(
    bench_of, database, builders
):
    job = builders.a_job(requests=40, shard_size=3)
    async with bench_of() as bench:
        task = asyncio.create_task(bench.drain(shards_max=16).run())
        await bench.until(lambda: bench.engine.running == ROOM)
        # Three shards of three fill a room of eight; none is leased that would only wait.
        assert builders.job(job.id).n_running == 9
        bench.engine.release()
        await task
        assert bench.engine.most == ROOM
        assert bench.heartbeat.leases == 0
    assert builders.job(job.id).state == "completed"
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_stop_gives_waiting_suspects_back_at_once(bench_of, database, builders):
    """A suspect waits for the engine to be its own; its worker stops before that."""
    job = builders.a_job(specs=[a_spec()] * 8, shard_size=4)
    execute(
        database,
        "UPDATE shards SET engine_deaths = 1 WHERE job_id = %s AND first_index = 4",
        job.id,
    )
    async with bench_of() as bench:
        task = asyncio.create_task(bench.drain().run())
        await bench.until(lambda: builders.job(job.id).n_running == 8)
        await bench.until(lambda: bench.engine.running == 4)
        bench.stopping.request("told to stop")
        bench.engine.release()
        await task
        assert bench.heartbeat.leases == 0
    assert states(database) == [
        (0, 4, "done", 1),
        (4, 8, "pending", 0),
    ]
    check_everything(database, bench.store)


@pytest.mark.asyncio
async def test_a_drain_that_cannot_lease_now_looks_after_what_runs(bench_of, database, builders):
    """Postgres refuses every claim while a shard runs; the shard ends as if nothing were."""
    job = builders.a_job(requests=4, shard_size=4)
    async with bench_of() as bench:
        task = asyncio.create_task(bench.drain().run())
        await bench.until(lambda: bench.engine.running == 4)
        execute(database, "ALTER TABLE turns RENAME TO turns_away")
        execute(
            database,
            """
            CREATE FUNCTION refuse() RETURNS bigint LANGUAGE plpgsql AS $$
            BEGIN RAISE EXCEPTION USING ERRCODE = '57P03'; END $$
            """,
        )
        execute(
            database,
            "CREATE VIEW turns AS SELECT *, refuse() AS refused FROM turns_away",
        )
        refused = builders.a_job(requests=4, shard_size=4)
        with pytest.raises(psycopg.OperationalError):
            builders.a_lease(bench.identity)
        await asyncio.wait([task], timeout=0.2)
        assert not task.done(), "it looks after the running shard"
        bench.engine.release()
        with pytest.raises(psycopg.OperationalError):
            await task
        assert bench.heartbeat.leases == 0
    assert builders.job(job.id).state == "completed"
    assert builders.job(refused.id).state == "queued"
    check_everything(database, bench.store)
