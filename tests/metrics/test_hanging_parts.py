"""Parts that hang or are away: /healthz, /readyz and /metrics answer in time and say which.

Prometheus gives up after ten seconds, a container's check after less. They are asked while more
requests wait for Postgres than the API has threads.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from fastapi.testclient import TestClient

from app.accounts.keys import mint_key
from app.kit.migrate import migrate
from app.main import create_app
from app.stack.postgres import EmbeddedPostgres
from app.stack.redis import EmbeddedRedis
from tests.fixtures.api import settings_for
from tests.metrics.watched import read_page

T = TypeVar("T")

IN_TIME_SECONDS = 20.0  # 6 are promised; without an end it would be much more than this
REQUESTS = 60  # more than there are threads


@contextmanager
def frozen(pid: int | None) -> Iterator[None]:
    """Let a server and all its processes stand still: they accept connections and say nothing."""
    assert pid is not None
    server = psutil.Process(pid)
    stopped = [server, *server.children(recursive=True)]
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in reversed(stopped):
            process.resume()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, dict[str, int]]]:
    """An API with servers of its own, and the process ids of those."""
    folder = tmp_path_factory.mktemp("hanging")
    postgres, redis = EmbeddedPostgres(folder / "postgres"), EmbeddedRedis(folder / "redis")
    postgres.start()
    redis.start()
    migrate(postgres.url)
    settings = settings_for(
        folder, database_url=postgres.url, redis_url=redis.url, database_connections=4
    )
    with TestClient(
        create_app(settings), client=("127.0.0.1", 5000), raise_server_exceptions=False
    ) as client:
        assert postgres.pid is not None
        assert redis.pid is not None
        yield client, {"postgres": postgres.pid, "redis": redis.pid}
    redis.stop()
    postgres.stop()


def timed(ask: Callable[[], T]) -> T:
    """Ask, and see that the answer comes in time."""
    began = time.monotonic()
    answer = ask()
    assert time.monotonic() - began < IN_TIME_SECONDS
    return answer


def parts_of(client: TestClient) -> dict[str, float]:
    """Scrape, and give what is said of each part."""
    page = read_page(client.get("/metrics").text)
    return {
        dict(labels)["part"]: value
        for (name, labels), value in page.items()
        if name == "tiller_part_up"
    }


def until_well(client: TestClient) -> None:
    """Wait until every part answers again."""
    deadline = time.monotonic() + 40
    while not all(parts_of(client).values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("part", ["postgres", "redis"])
def test_a_part_that_hangs_is_named_in_time_however_many_wait_for_it(
    api: tuple[TestClient, dict[str, int]], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, pids = api
    monkeypatch.setattr("app.metrics.KEPT_SECONDS", 0.0)
    until_well(client)
    key = {"authorization": f"Bearer {mint_key()}"}
    other = {"postgres": "redis", "redis": "postgres"}[part]
    with ThreadPoolExecutor(REQUESTS) as threads, frozen(pids[part]):
        waiting = [threads.submit(client.get, "/v1/jobs", headers=key) for _ in range(REQUESTS)]
        assert timed(lambda: client.get("/healthz")).status_code == 200
        checks = timed(lambda: client.get("/readyz")).json()["checks"]
        assert (checks[part], checks[other]) == ("down", "ok")
        with ThreadPoolExecutor(3) as scrapers:
            for seen in timed(lambda: list(scrapers.map(parts_of, [client] * 3))):
                assert seen == {part: 0, other: 1, "object_store": 1}
        held = [answer for answer in waiting if not answer.done()]
        assert bool(held) == (part == "postgres")
    assert {answer.result().status_code for answer in waiting} <= {401, 503}
    until_well(client)


def test_a_postgres_that_was_stopped_is_named_in_time(
    redis_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = EmbeddedPostgres(tmp_path_factory.mktemp("stopped"))
    server.start()
    settings = settings_for(tmp_path, database_url=server.url, redis_url=redis_url)
    with TestClient(create_app(settings), client=("127.0.0.1", 5000)) as client:
        assert client.get("/readyz").json()["checks"]["postgres"] == "ok"
        server.stop()
        assert timed(lambda: client.get("/readyz")).json()["checks"]["postgres"] == "down"
        assert timed(lambda: parts_of(client))["postgres"] == 0
