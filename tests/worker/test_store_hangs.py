"""A store that refuses or hangs: a part is given up without it, and no other work waits for it."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checker import check_everything
from tests.results.samples import a_plain_run, a_run, a_shard, open_part
from tests.worker.conftest import shards, states
from tests.worker.told_store import ToldStore, everything, nothing
from worker import drain as drain_module
from worker import shard_run
from worker.part_writer import PartClosedError, PartWriter, StoreAwayError

SECONDS = 20.0  # to wait for what must not wait for the store


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldStore]:
    """An S3 endpoint in this process."""
    store = ToldStore()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    yield store
    store.stop()


def a_part(told: ToldStore, tmp_path: Path, *, captures: bool = False) -> PartWriter:
    """A part of one request, ready to be closed; of several files if it captures."""
    writer = open_part(a_shard(end=1), told.open(), tmp_path / "spool")
    if captures:
        run = a_run(0, tmp_path / "mapped")
        writer.add(run.work, run.outcome)
    else:
        writer.add(*a_plain_run(0))
    return writer


def a_refused_part(told: ToldStore, tmp_path: Path) -> PartWriter:
    """Write a part that the store refuses three times."""
    writer = a_part(told, tmp_path)
    told.refuses = everything
    for _ in range(3):
        with pytest.raises(StoreAwayError):
            writer.close()
    return writer


def left_in(tmp_path: Path) -> list[Path]:
    """List what lies in the spool folder."""
    return [path for path in (tmp_path / "spool").rglob("*") if path.is_file()]


def test_a_file_that_was_refused_many_times_is_deleted_once(
    told: ToldStore, tmp_path: Path
) -> None:
    writer = a_refused_part(told, tmp_path)
    told.refuses = nothing
    writer.close()
    assert len(told.objects) == 1
    writer.withdraw()
    assert len(told.keys("DELETE")) == 1
    assert told.objects == {}


def test_a_part_is_given_up_without_asking_the_store_that_is_away(
    told: ToldStore, tmp_path: Path
) -> None:
    writer = a_refused_part(told, tmp_path)
    writer.abandon()
    assert {method for method, _ in told.asked} == {"PUT"}
    assert left_in(tmp_path) == []
    with pytest.raises(PartClosedError):
        writer.close()


def test_a_store_that_does_not_delete_one_file_is_not_asked_for_the_next(
    told: ToldStore, tmp_path: Path
) -> None:
    writer = a_part(told, tmp_path, captures=True)
    assert len(writer.close().files) > 1
    told.refuses = lambda method, _: method == "DELETE"
    writer.withdraw()
    assert len(told.keys("DELETE")) == 1


@pytest.mark.parametrize("in_the_end", ["taken", "refused"])
def test_a_part_is_given_up_while_its_upload_hangs(
    told: ToldStore, tmp_path: Path, in_the_end: str
) -> None:
    writer = a_part(told, tmp_path, captures=True)
    told.holds = everything
    with ThreadPoolExecutor() as threads:
        closing = threads.submit(writer.close)
        try:
            asked = threads.submit(_until_asked, told)
            asked.result(SECONDS)
            threads.submit(writer.abandon).result(SECONDS)
            assert not closing.done()
            told.refuses = everything if in_the_end == "refused" else nothing
        finally:
            told.holds = nothing
            told.release()
        with pytest.raises(PartClosedError if in_the_end == "taken" else StoreAwayError):
            closing.result(SECONDS)
    assert len(told.keys("PUT")) == 1, "the next file was not begun"
    assert told.objects == {}
    assert left_in(tmp_path) == []


def _until_asked(told: ToldStore) -> None:
    while not told.asked:
        told.gate.wait(0.01)


@pytest.mark.asyncio
async def test_a_worker_that_has_to_end_does_not_wait_for_a_store_that_hangs(
    bench_of, database, builders, told, monkeypatch
):
    monkeypatch.setattr(shard_run, "STORE_LAST_SECONDS", 0.1)
    builders.a_job(requests=8, shard_size=4)
    told.holds = everything
    async with bench_of() as bench:
        bench.store = told.open()
        bench.engine.release()
        task = asyncio.create_task(bench.drain(store=bench.store).run())
        try:
            await bench.until(lambda: len(told.asked) == 2)
            bench.stopping.abort("its time is over")
            await asyncio.wait_for(task, SECONDS)
            assert states(database) == [
                (0, 4, "pending", 0),
                (4, 8, "pending", 0),
            ]
            assert bench.heartbeat.leases == 0
        finally:
            told.holds = nothing
            told.release()
    assert bench.left_in_spool() == []
    check_everything(database)


@pytest.mark.asyncio
async def test_a_job_that_hangs_while_it_is_finished_leaves_threads_to_others(
    bench_of, builders, told
):
    job = builders.a_job(requests=4, shard_size=4)
    told.holds = lambda _, key: key.endswith("manifest.json")
    async with bench_of() as bench:
        await _leaves_threads_to_others(bench, told)
    assert builders.job(job.id).state == "completed"


@pytest.mark.asyncio
async def test_a_part_whose_deletion_hangs_leaves_threads_to_others(
    bench_of, database, builders, told
):
    builders.a_job(requests=4, shard_size=4)
    told.holds = lambda method, _: method == "PUT"
    async with bench_of() as bench:

        def lose_lease() -> None:
            with database.transaction() as conn:
                conn.execute(
                    "UPDATE shards SET state = 'pending', lease_token = NULL, worker_id = NULL,"
                    " lease_expires_at = NULL"
                )
                conn.execute("UPDATE jobs SET n_running = 0")
                bench.stopping.request("leases nothing more")
            told.holds = lambda method, _: method == "DELETE"
            told.release()

        await _leaves_threads_to_others(bench, told, once_held=lose_lease)
    assert told.objects == {}


async def _leaves_threads_to_others(bench, told: ToldStore, once_held=None) -> None:
    """Run a drain that has one thread for blocking work, until the store holds its last request."""
    bench.store = told.open()
    bench.engine.release()
    with ThreadPoolExecutor(1) as threads:
        drain = bench.drain(store=bench.store, threads=threads)
        task = asyncio.create_task(drain.run())
        try:
            if once_held is not None:
                await bench.until(lambda: told.asked)
                once_held()
            await bench.until(lambda: told.asked and told.holds(*told.asked[-1]))
            free = drain.shop.call(lambda: "a thread is free")
            assert await asyncio.wait_for(free, SECONDS) == "a thread is free"
            assert not task.done()
        finally:
            told.holds = nothing
            told.release()
        await asyncio.wait_for(task, SECONDS)


@pytest.mark.asyncio
async def test_a_drain_ends_although_the_store_hangs_when_it_is_looked_at(
    bench_of, database, builders, told, monkeypatch
):
    monkeypatch.setattr(drain_module, "STORE_LOOK_SECONDS", 0.1)
    builders.a_job(requests=8, shard_size=4)
    told.refuses = lambda method, _: method == "PUT"
    told.holds = lambda method, _: method == "HEAD"
    async with bench_of() as bench:
        bench.store = told.open()
        bench.engine.release()
        drain = bench.drain(shards_max=1, store=bench.store, store_patience_seconds=0.0)
        try:
            await asyncio.wait_for(drain.run(), SECONDS)
            assert told.keys("HEAD") != []
            assert bench.engine.requests_run == 4, "nothing more is leased"
        finally:
            told.holds = nothing
            told.release()
    assert {row["state"] for row in shards(database)} == {"pending"}
