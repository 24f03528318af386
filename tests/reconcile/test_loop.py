"""The loop around the duties: it goes on whatever one of them says, and Postgres with it."""

import threading
import time
from pathlib import Path

from app.jobs.lifecycle import get_job
from app.jobs.states import JobState
from app.kit.db import Database
from app.kit.migrate import migrate
from app.reconcile.loop import Step, all_steps, reconcile_until, run_round
from app.settings import Settings
from app.stack.postgres import EmbeddedPostgres
from app.storage import open_store
from tests.checker import check_everything
from tests.fixtures.builders import Builders, insert_job
from tests.fixtures.servers import kill


class NobodyToWake:
    def wake(self, model: str) -> bool:
        del model
        return False


def some_settings(tmp_path: Path, database_url: str) -> Settings:
    return Settings(
        database_url=database_url,
        redis_url="unix:///nowhere",
        object_store=(tmp_path / "objects").as_uri(),
        models_file=tmp_path / "models.toml",
        key_pepper="a pepper for tests only",
        reconcile_seconds=0.05,
    )


def wait_until(true, *, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def overdue_job(conn, account_id):
    return insert_job(conn, account_id, requests=2, expires_in_seconds=-1)


def is_expired(conn, job_id) -> bool:
    job = get_job(conn, job_id)
    return job is not None and job.state is JobState.expired


def test_a_step_that_fails_does_not_stop_the_others() -> None:
    ran: list[str] = []

    def fails() -> None:
        ran.append("fails")
        raise OSError("away")

    duties = [Step("fails", fails), Step("works", lambda: ran.append("works"))]
    run_round(duties, threading.Event())
    run_round(duties, threading.Event())
    assert ran == ["fails", "works"] * 2


def test_a_step_runs_when_it_is_due_and_none_after_the_stop() -> None:
    ran: list[str] = []
    stop = threading.Event()
    duties = [
        Step("hourly", lambda: ran.append("hourly"), every_seconds=3600),
        Step("stops", stop.set),
        Step("late", lambda: ran.append("late")),
    ]
    run_round(duties, stop)
    stop.clear()
    run_round(duties, stop)
    assert ran == ["hourly"]


def test_one_round_brings_jobs_to_their_end(database, object_store_url, builders) -> None:
    store = open_store(object_store_url)
    overdue = builders.a_job(requests=10, shard_size=4, expires_in_seconds=-1)
    waiting = builders.a_job(requests=4)
    builders.a_lease(lease_seconds=0)
    run_round(all_steps(database, store, NobodyToWake()), threading.Event())
    assert builders.job(overdue.id).state == "expired"
    assert builders.job(waiting.id).n_running == 0
    check_everything(database, store)


def test_the_reconciler_outlives_a_kill_of_postgres(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "postgres")
    url = server.start()
    migrate(url)
    database = Database(url, size_max=4, wait_seconds=2)
    stop = threading.Event()
    settings = some_settings(tmp_path, url)
    store = open_store(settings.object_store)
    thread = threading.Thread(
        target=reconcile_until, args=(stop, settings, database, store, NobodyToWake())
    )
    try:
        builders = Builders(database)
        job = builders.a_job(requests=2, expires_in_seconds=-1)
        thread.start()
        wait_until(lambda: builders.job(job.id).state == "expired")
        for _ in range(2):
            kill(server)
            assert server.start() == url
            account = job.account_id
            job = database.run(lambda conn, account=account: overdue_job(conn, account))
            wait_until(lambda job=job: database.run(lambda conn: is_expired(conn, job.id)))
        assert thread.is_alive()
    finally:
        stop.set()
        thread.join(30)
        database.close()
        server.stop()
    assert not thread.is_alive()
