"""A Postgres that answers, but late: it is up, and what it said late is in the next scrape.

It is as slow as a lock on one of the tables lasts that a scrape reads.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from fastapi.testclient import TestClient

from app import metrics
from app.kit.db import Database
from app.main import create_app
from app.reconcile.samples import take_sample
from tests.fixtures.api import settings_for
from tests.metrics.promql import Samples
from tests.metrics.watched import samples_of

WAIT_SECONDS = 30.0
POSTGRES = ("tiller_part_up", frozenset({("part", "postgres")}))
IDLE = ("tiller_reconciler_idle_seconds", frozenset())
AGE = ("tiller_numbers_age_seconds", frozenset())


@contextmanager
def slow(database_url: str) -> Iterator[None]:
    """Keep whoever reads the samples waiting."""
    with psycopg.connect(database_url) as conn:
        conn.execute("LOCK TABLE samples IN ACCESS EXCLUSIVE MODE")
        yield


def until_answered() -> None:
    """Wait until the numbers that were asked for have come."""
    deadline = time.monotonic() + WAIT_SECONDS
    while any(thread.name == "ask-numbers" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def scrape(
    database: Database,
    database_url: str,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TestClient]:
    """An API with a single connection, which does not wait long for numbers."""
    monkeypatch.setattr(metrics, "KEPT_SECONDS", 0.0)
    monkeypatch.setattr(metrics, "PARTS_SECONDS", 2.0)
    monkeypatch.setattr(metrics, "STATEMENT_SECONDS", 600)
    take_sample(database)
    settings = settings_for(
        tmp_path, database_url=database_url, redis_url=redis_url, database_connections=1
    )
    with TestClient(create_app(settings)) as client:
        yield client


def page_of(client: TestClient) -> Samples:
    return samples_of(client.app)  # type: ignore[arg-type]


def test_a_slow_postgres_is_up_and_its_late_numbers_are_told(
    scrape: TestClient, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow(database_url):
        first = page_of(scrape)
    assert first[POSTGRES] == 1
    assert IDLE not in first, "there were none yet"
    until_answered()
    with slow(database_url):
        second = page_of(scrape)
        assert second[POSTGRES] == 1
        assert IDLE in second
        assert second[AGE] > 0
        with monkeypatch.context() as later:
            later.setattr(metrics, "LATE_SECONDS", 0.0)
            assert IDLE not in page_of(scrape), "they are too old"
    until_answered()
    assert IDLE in page_of(scrape)


def test_one_slow_statement_does_not_take_all_other_numbers_away(
    scrape: TestClient, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "STATEMENT_SECONDS", 1)
    monkeypatch.setattr(metrics, "PARTS_SECONDS", WAIT_SECONDS)
    with slow(database_url):
        page = page_of(scrape)
    assert IDLE not in page
    assert ("tiller_database_bytes", frozenset()) in page
    assert page[POSTGRES] == 1
    assert IDLE in page_of(scrape)
