"""Large bodies at a server: Jobs wait in turns, Completions go through, too many are refused.

Jobs are worked on for as long as a lock on a table that they write lasts.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import httpx
import psycopg
import pytest
from fastapi import FastAPI

from app.kit.body_limit import BodyLimitMiddleware
from app.kit.db import Database
from app.kit.large_bodies import LARGE_BODY_BYTES, Line
from app.main import LARGE_AT_ONCE, create_app
from app.settings import Limits
from tests.fixtures.api import UNHURRIED, a_key, settings_for
from tests.patching.serving import serving

WAIT_SECONDS = 30.0
LARGE = LARGE_BODY_BYTES + 500_000
ACCOUNT_BYTES = 2 * LARGE
JOB = {"model": "tiny", "requests": [{"prompt": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}


@dataclass
class Large:
    """A server and clients with large bodies."""

    url: str
    app: FastAPI
    database: Database
    threads: ThreadPoolExecutor

    def post(
        self, key: str, path: str, body: object, *, size: int = LARGE
    ) -> "Future[httpx.Response]":
        """Send a body that blanks make large, in a thread."""
        content = json.dumps(body).encode().ljust(size)
        headers = {"authorization": f"Bearer {key}"}
        return self.threads.submit(
            httpx.post, self.url + path, content=content, headers=headers, timeout=4 * WAIT_SECONDS
        )

    def count(self, account_id: UUID) -> dict[str, int]:
        """Count what an account has stored and holds."""
        with self.database.transaction() as conn:
            row = conn.execute(
                """
                SELECT (SELECT count(*) FROM jobs WHERE account_id = accounts.id) AS jobs,
                    (SELECT count(*) FROM holds WHERE account_id = accounts.id) AS holds,
                    (SELECT count(*) FROM idempotency_keys) AS keys, held
                FROM accounts WHERE id = %s
                """,
                [account_id],
            ).fetchone()
        assert row is not None
        return row

    @property
    def line(self) -> Line:
        """The line of Jobs."""
        (line,) = (
            each.kwargs["line"]
            for each in self.app.user_middleware
            if each.cls is BodyLimitMiddleware  # type: ignore[comparison-overlap]
        )
        assert isinstance(line, Line)
        return line

    @contextmanager
    def jobs_held_up(self) -> Iterator[Callable[[int], None]]:
        """Keep Jobs from being stored; give what waits until so many are worked on."""
        with (
            psycopg.connect(self.database.url) as lock,
            psycopg.connect(self.database.url, autocommit=True) as look,
        ):
            lock.execute("LOCK TABLE shards IN ACCESS EXCLUSIVE MODE")

            def until(jobs: int) -> None:
                def waiting() -> int:
                    row = look.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
                    assert row is not None
                    return int(row[0])

                wait(lambda: waiting() == jobs)

            yield until


def wait(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def served(database: Database, folder: Path, seconds: int) -> Iterator[Large]:
    """An API on a port."""
    limits = Limits(
        **UNHURRIED,  # type: ignore[arg-type]
        large_bodies_bytes=ACCOUNT_BYTES,
        large_body_seconds=seconds,
    )
    app = create_app(settings_for(folder, database_url=database.url, limits=limits))
    with serving(app) as url, ThreadPoolExecutor(16) as threads:
        yield Large(url, app, database, threads)


@pytest.fixture
def large(database: Database, tmp_path: Path) -> Iterator[Large]:
    """An API where turns may be long in coming."""
    with served(database, tmp_path, 120) as running:
        yield running


def test_completions_go_through_while_jobs_of_others_have_every_turn(large: Large) -> None:
    accounts = [a_key(large.database) for _ in range(LARGE_AT_ONCE)]
    _, other = a_key(large.database)
    with large.jobs_held_up() as until:
        jobs = [large.post(key, "/v1/jobs", JOB) for _, key in accounts]
        until(LARGE_AT_ONCE)
        jobs.append(large.post(other, "/v1/jobs", JOB))
        for key in (other, accounts[0][1]):
            answer = large.post(key, "/v1/completions", COMPLETION).result(WAIT_SECONDS)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
        assert not any(job.done() for job in jobs)
    assert [job.result(WAIT_SECONDS).status_code for job in jobs] == [202] * len(jobs)


def test_an_account_with_much_in_line_is_refused_and_others_are_not(large: Large) -> None:
    (account_id, key), (_, other) = a_key(large.database), a_key(large.database)
    with large.jobs_held_up() as until:
        jobs = [large.post(key, "/v1/jobs", JOB) for _ in range(2)]
        wait(lambda: large.line.bytes_of(account_id) == 2 * LARGE)
        until(1)
        refused = large.post(key, "/v1/jobs", JOB, size=20 * LARGE).result(WAIT_SECONDS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "intake_full")
        assert int(refused.headers["retry-after"]) > 0
        assert f"of {20 * LARGE} " in refused.json()["error"]["message"]
        jobs.append(large.post(other, "/v1/jobs", JOB))
        until(2)
    assert [job.result(WAIT_SECONDS).status_code for job in jobs] == [202] * 3
    found = large.count(account_id)
    assert (found["jobs"], found["holds"], found["keys"]) == (2, 2, 0)
    assert large.line.bytes_of(account_id) == 0
    assert large.post(key, "/v1/jobs", JOB).result(WAIT_SECONDS).status_code == 202


def test_a_job_whose_turn_does_not_come_is_refused_and_leaves_nothing(
    database: Database, tmp_path: Path
) -> None:
    with served(database, tmp_path, 1) as large:
        account_id, key = a_key(database)
        with large.jobs_held_up() as until:
            first = large.post(key, "/v1/jobs", JOB)
            until(1)
            refused = large.post(key, "/v1/jobs", JOB).result(WAIT_SECONDS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "intake_full")
            assert "large_body_seconds" in refused.json()["error"]["message"]
            assert large.line.bytes_of(account_id) == LARGE
        assert first.result(WAIT_SECONDS).status_code == 202
        found = large.count(account_id)
        assert (found["jobs"], found["holds"]) == (1, 1)
