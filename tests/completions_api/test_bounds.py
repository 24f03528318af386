"""What a refused body may cost: nothing is looked up, read or parsed that no rule allows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import pytest
from fastapi.testclient import TestClient

from app.catalog import load_catalog
from app.completions import endpoints
from app.completions.records import ClaimedCompletion, Failure
from app.completions.waiting import error_of
from app.jobs import intake
from app.kit.db import Database
from app.kit.ids import new_uuid
from app.kit.json_body import read_object
from app.main import create_app
from app.settings import Limits
from app.storage import ObjectStore
from tests.api.test_patching import patch, run_source
from tests.fixtures.api import UNHURRIED, Api, a_key, settings_for
from tests.fixtures.away import store_away
from tests.fixtures.builders import Builders
from tests.fixtures.documented import Described
from tests.fixtures.tiny_model import HIDDEN_SIZE, write_tiny_model
from worker.unlisted import Gate

__all__ = ["store_away"]

PLAIN = {"model": "tiny", "prompt": [2, 3, 4], "max_tokens": 2}
ROW = [1.0] * HIDDEN_SIZE
SMALL = Limits(
    json_containers=40, json_containers_job=80, named_bytes_completion=2 * 32, **UNHURRIED
)


@pytest.fixture
def small(database: Database, database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Api]:
    """The API with small limits."""
    settings = settings_for(tmp_path, database_url=database_url, redis_url=redis_url, limits=SMALL)
    account_id, key = a_key(database)
    app = create_app(settings)
    headers = {"authorization": f"Bearer {key}"}
    with TestClient(app, headers=headers, raise_server_exceptions=False) as client:
        client.event_hooks["response"].append(Described(app))
        yield Api(client, database, account_id, key)


@pytest.fixture
def looked_up(api: Api, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every reference that the API looks up from now on."""
    found: list[object] = []
    state = api.client.app.state  # type: ignore[attr-defined]

    def noting(work: Any) -> Any:
        def noted(*args: Any) -> Any:
            found.extend(args[-2] if work in loads else args[-1])
            return work(*args)

        return noted

    loads = (endpoints.load_vectors,)
    monkeypatch.setattr(endpoints, "load_vectors", noting(endpoints.load_vectors))
    monkeypatch.setattr(intake, "find_vectors", noting(intake.find_vectors))
    for rows in (state.captured, state.captured_alone):
        monkeypatch.setattr(rows, "read", noting(rows.read))
    return found


def copies(count: int) -> dict[str, Any]:
    jobs = [f"job_{number:032x}" for number in range(count)]
    return {
        "interventions": [
            {
                "op": "replace",
                "layers": [1],
                "from": {"job": job, "request_index": 0, "layer": 1, "positions": [0]},
            }
            for job in jobs
        ]
    }


def named(count: int) -> dict[str, Any]:
    names = [f"sv_{number:064x}" for number in range(count)]
    return {"apply_steering_vectors": [{"vector": v, "layer_indices": [0]} for v in names]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (copies(2000), "holds 2000 interventions; 1 to 16 are allowed"),
        (named(2000), "holds 2000 Steering vectors; at most 8 are allowed"),
    ],
)
def test_a_list_that_is_too_long_is_refused_before_anything_in_it_is_looked_up(
    api: Api, looked_up: list[object], body: dict[str, Any], says: str
) -> None:
    before = api.numbers()
    (param,) = body
    alone = api.client.post("/v1/completions", json={**PLAIN, **body})
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, param)
    assert says in alone.json()["error"]["message"]
    in_job = api.submit({"prompt": [2, 3], **body}, {"prompt": [2, 3]})
    assert (in_job.status_code, in_job.json()["error"]["param"]) == (400, f"requests[0].{param}")
    by_default = api.submit({"prompt": [2, 3]}, defaults=body)
    assert by_default.status_code == 400
    assert says in by_default.json()["error"]["message"]
    assert looked_up == []
    assert api.numbers() == before


def test_what_is_as_long_as_it_may_be_is_looked_up(api: Api, looked_up: list[object]) -> None:
    for body, count in ((copies(16), 16), (named(8), 8)):
        looked_up.clear()
        assert api.client.post("/v1/completions", json={**PLAIN, **body}).status_code == 400
        assert len(looked_up) == count
        looked_up.clear()
        assert api.submit({"prompt": [2, 3], **body}).status_code == 400
        assert len(looked_up) == count


def test_a_completion_names_stored_vectors_up_to_a_limit_of_its_own(small: Api) -> None:
    names = [
        small.client.post(
            "/v1/steering_vectors", json={"activations": [k * number for number in ROW]}
        ).json()["id"]
        for k in (1, 2, 3)
    ]

    def answer(count: int, **fields: Any) -> dict[str, Any]:
        items = [{"op": "add", "layers": [0], "vector": name} for name in names[:count]]
        sent = small.client.post("/v1/completions", json={**PLAIN, "interventions": items} | fields)
        error: dict[str, Any] = sent.json()["error"]
        return error

    assert answer(2)["code"] == "no_worker"
    error = answer(3)
    assert (error["param"], error["code"]) == ("interventions", "named_vectors_too_large")
    assert "96 bytes in all; at most 64" in error["message"]
    assert answer(3, best_of=1)["param"] == "best_of"


def test_a_completion_copies_rows_up_to_a_limit_of_its_own(
    small: Api, builders: Builders, tmp_path: Path
) -> None:
    source, _ = run_source(small, builders, tmp_path / "spool")
    with small.database.transaction() as conn:
        conn.execute("UPDATE workers SET state = 'gone'")  # so that good ones are answered at once

    def answer(*positions: int, **fields: Any) -> dict[str, Any]:
        (item,) = patch(source, 1, 0, positions=list(positions))["interventions"]
        body = {**PLAIN, "interventions": [{**item, **fields}]}
        error: dict[str, Any] = small.client.post("/v1/completions", json=body).json()["error"]
        return error

    assert answer(0, 1)["code"] == "no_worker"
    error = answer(0, 1, 2)
    assert (error["param"], error["code"]) == ("interventions", "captured_rows_too_large")
    assert "Completion" in error["message"]
    assert "64 bytes" in error["message"]
    assert "layer 9" in answer(0, 1, 2, layers=[9])["message"]


ROUTES = {
    "/v1/completions": (SMALL.json_containers, lambda many: {**PLAIN, "captures": many}),
    "/v1/tokenize": (SMALL.json_containers, lambda many: {"model": "tiny", "prompt": many}),
    "/v1/steering_vectors": (SMALL.json_containers, lambda many: {"activations": many}),
    "/v1/jobs": (SMALL.json_containers_job, lambda many: {"model": "tiny", "requests": many}),
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("tiny", [[], {}])
def test_every_route_refuses_more_lists_and_objects_than_it_takes(
    small: Api, path: str, tiny: object
) -> None:
    most, body = ROUTES[path]
    before = small.numbers()
    for count in (most + 1, 10_000):
        sent = orjson.dumps(body([tiny] * count))
        answer = small.client.post(path, content=sent, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "bad_json"), error
        assert f"lists and objects; at most {most} are allowed" in error["message"]
    text = small.client.post(path, json=body(["[{" * most]))
    assert "bad_json" not in text.text
    assert small.numbers() == before


def test_the_largest_bodies_that_are_good_are_under_the_default_limits() -> None:
    limits = Limits()
    row = [0] * HIDDEN_SIZE
    rows = [[row] * (limits.vector_numbers // HIDDEN_SIZE // limits.vectors_per_request)]
    steer = {"activations": rows, "layer_indices": [0]}
    sent = {**PLAIN, "apply_steering_vectors": [steer] * limits.vectors_per_request}
    read = read_object(
        orjson.dumps(sent),
        depth_max=limits.json_depth,
        containers_max=limits.json_containers,
    )
    assert read == sent
    request = {
        "custom_id": "a",
        "body": {
            "prompt": [1],
            "apply_steering_vectors": [
                {"vector": "sv_", "layer_indices": [1], "position_spans": [[0, 1], [2, 3]]}
            ],
            "captures": [{"name": "x", "layers": [1], "at": {"spans": [[0, 1]]}}],
            "interventions": [{"op": "add", "layers": [1], "vector": "sv_", "at": {}}],
        },
    }
    containers = str(request).count("[") + str(request).count("{")
    assert containers == 19
    assert limits.requests_per_job * containers < limits.json_containers_job


def test_a_store_that_is_away_is_503_for_listed_and_unlisted_models(
    api: Api, builders: Builders, tmp_path: Path, store_away: ObjectStore
) -> None:
    source, _ = run_source(api, builders, tmp_path / "spool")
    body = {**PLAIN, "interventions": patch(source, 1, 0)["interventions"]}
    rows = api.client.app.state.captured_alone  # type: ignore[attr-defined]
    rows._store = store_away
    before = api.numbers()
    answer = api.client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    model = load_catalog(write_tiny_model(tmp_path / "worker")).get("tiny")
    gate = Gate(api.database, store_away, model, Limits())
    failure = gate.admit(claim(api.account_id, body))
    assert isinstance(failure, Failure)
    error = error_of(failure)
    assert (error.status, error.code) == (503, "unavailable")
    assert error.retry_after is not None
    assert api.numbers() == before


def test_a_worker_looks_nothing_up_for_a_list_that_is_too_long(
    api: Api, tmp_path: Path, store_away: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_catalog(write_tiny_model(tmp_path / "worker")).get("tiny")
    looks: list[object] = []
    run = api.database.run

    def noted(work: Any, **options: Any) -> Any:
        looks.append(work)
        return run(work, **options)

    monkeypatch.setattr(api.database, "run", noted)
    gate = Gate(api.database, store_away, model, Limits())
    gate.admit(claim(api.account_id, PLAIN))
    usual = len(looks)
    for body in (copies(2000), named(2000)):
        looks.clear()
        failure = gate.admit(claim(api.account_id, {**PLAIN, **body}))
        assert isinstance(failure, Failure)
        assert failure.code == "invalid_request"
        assert "holds 2000" in failure.message
        assert len(looks) <= usual


def claim(account_id: UUID, body: dict[str, Any]) -> ClaimedCompletion:
    """A Completion as a worker claims it when the API did not know its model."""
    return ClaimedCompletion(new_uuid(), account_id, (), stream=False, body=body)
