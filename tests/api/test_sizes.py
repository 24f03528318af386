"""What a Job may bring along in all: refused as a whole before anything is stored or held."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from app.kit.db import Database
from app.main import create_app
from app.settings import Limits
from tests.fixtures.api import Api, a_key, settings_for

ROW = [1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, -1.5]


@pytest.fixture
def tight(tmp_path: Path, database: Database, database_url: str, redis_url: str) -> Iterator[Api]:
    """An API that takes 2,000 bytes of requests and 64 bytes of named vectors a Job."""
    settings = settings_for(
        tmp_path,
        database_url=database_url,
        redis_url=redis_url,
        limits=Limits(job_spec_bytes=2000, named_vectors_bytes=64),
    )
    account_id, key = a_key(database)
    app = create_app(settings)
    with TestClient(app, headers={"authorization": f"Bearer {key}"}) as client:
        yield Api(client, database, account_id, key)


def test_defaults_that_make_a_job_too_large_are_refused(tight: Api) -> None:
    before = tight.numbers()
    spans = [[position, position + 1] for position in range(0, 16, 2)]
    item = {"op": "add", "layers": [0, 1], "vector": ROW, "at": {"spans": spans}}
    answer = tight.submit(*[{"prompt": [5, 6]}] * 8, defaults={"interventions": [item] * 4})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "job_too_large")
    assert tight.numbers() == before
    assert tight.submit(*[{"prompt": [5, 6]}] * 8).status_code == 202


def test_a_job_that_grows_too_large_is_refused_before_it_fills_memory(tight: Api) -> None:
    spans = [[position, position + 1] for position in range(0, 60, 2)]
    items = [
        {"op": "add", "layers": [0], "vector": [*ROW[:-1], k], "at": {"spans": spans}}
        for k in range(1, 17)
    ]
    defaults = {"interventions": items, "max_tokens": 60, "stop": ["x" * 1000] * 4}
    tracemalloc.start()
    try:
        answer = tight.submit(*[{"prompt": [5, 6]}] * 4000, defaults=defaults)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.json()["error"]["code"] == "job_too_large"
    assert peak < 20 * 1024**2  # written out, these requests are 45 MB


def test_stored_vectors_beyond_the_limit_are_refused_unread(tight: Api) -> None:
    names = [
        tight.client.post(
            "/v1/steering_vectors", json={"activations": [k * number for number in ROW]}
        ).json()["id"]
        for k in (1, 2, 3)
    ]

    def steer(*chosen: str) -> dict[str, object]:
        items = [{"op": "add", "layers": [0], "vector": name} for name in chosen]
        return {"prompt": [5, 6], "interventions": items}

    before = tight.numbers()
    answer = tight.submit(*(steer(name) for name in names))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "named_vectors_too_large"
    assert "96 bytes" in error["message"]
    assert tight.numbers() == before
    assert tight.submit(steer(*names[:2]), steer(names[0])).status_code == 202


def test_a_capture_name_means_one_thing_in_a_job(api: Api) -> None:
    before = api.numbers()

    def read(**fields: object) -> dict[str, object]:
        return {"prompt": [5, 6], "captures": [{"name": "it", "layers": [0], **fields}]}

    answer = api.submit(read(), read(layers=[1]), read(reduce="norm"), read(site="mlp_out"))
    error = answer.json()["error"]
    assert (answer.status_code, error["total"]) == (400, 2)
    assert [detail["index"] for detail in error["details"]] == [2, 3]
    assert {detail["code"] for detail in error["details"]} == {"capture_conflict"}
    assert api.numbers() == before
