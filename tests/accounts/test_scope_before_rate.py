"""A key that may not use a route is told so, however often it asks: 403 comes before 429."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from app.accounts import access, rate
from app.kit.db import Database
from app.main import create_app
from app.settings import Limits
from tests.fixtures.api import a_key, settings_for

ONE = Limits(completions_per_minute=1, creates_per_minute=1, requests_per_minute=1)


@pytest.fixture
def hurried(
    database: Database, database_url: str, redis_url: str, tmp_path: Path
) -> Iterator[TestClient]:
    """The API to a key that may ask once a minute and has no scope that writes."""
    settings = settings_for(tmp_path, database_url=database_url, redis_url=redis_url, limits=ONE)
    _, key = a_key(database, scopes=frozenset({"jobs:read"}))
    headers = {"authorization": f"Bearer {key}"}
    with TestClient(create_app(settings), headers=headers) as client:
        yield client


def limited_routes(client: TestClient) -> Iterator[tuple[APIRoute, list[str]]]:
    """Give each route that has a rate, with what is asked before it runs, in order."""
    names = {access.__name__: "scope", rate.__name__: "rate"}
    for route in client.app.routes:  # type: ignore[attr-defined]
        if not isinstance(route, APIRoute):
            continue
        asked = [
            names[call.__module__]
            for needed in route.dependant.dependencies
            if (call := needed.call) is not None and call.__module__ in names
            if call is not access.caller
        ]
        if "rate" in asked:
            yield route, asked


def test_every_route_with_a_scope_asks_for_it_before_it_counts(hurried: TestClient) -> None:
    found = list(limited_routes(hurried))
    assert len([asked for _, asked in found if "scope" in asked]) >= 4
    for route, asked in found:
        if "scope" in asked:
            assert asked[0] == "scope", route.path


def test_a_key_without_the_scope_is_told_so_again_and_again(hurried: TestClient) -> None:
    for route, asked in limited_routes(hurried):
        if "scope" not in asked:
            continue
        for _ in range(3):
            answer = hurried.post(route.path.replace("{job_id}", "job_" + "0" * 32), json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                403,
                "insufficient_scope",
            )
            assert "x-ratelimit-limit-requests" not in answer.headers
