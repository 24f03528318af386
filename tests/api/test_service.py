"""What is not about Jobs: models, limits, health, ids, and parts of the service being away."""

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from app.accounts.keys import mint_key
from app.main import create_app
from app.settings import Limits
from app.stack.postgres import EmbeddedPostgres
from tests.fixtures.api import Api, a_key, settings_for
from tests.fixtures.builders import Builders


def test_models_say_what_they_can_do(api: Api, builders: Builders) -> None:
    api.submit()
    builders.a_worker()
    page = api.client.get("/v1/models").json()
    assert [model["id"] for model in page["data"]] == ["tiny"]
    model = page["data"][0]
    assert model["capabilities"] == {
        "hidden_size": 8,
        "n_layers": 4,
        "max_model_len": 64,
        "max_logprobs": 100,
        "dtype": "float32",
        "sites": {
            "resid_pre": {"width": 8},
            "resid_mid": {"width": 8},
            "resid_post": {"width": 8},
            "attn_out": {"width": 8},
            "mlp_out": {"width": 8},
            "z": {"width": 8, "heads": 2},
        },
        "vocab_size": 258,
        "typical_norms": None,
    }
    assert (model["queue"]["jobs_live"], model["queue"]["workers_ready"]) == (1, 1)
    one = api.client.get("/v1/models/tiny").json()
    assert one["capabilities"] == model["capabilities"]


def test_every_limit_is_served(api: Api) -> None:
    api.submit()
    served = {item["id"]: item for item in api.client.get("/v1/limits").json()["data"]}
    assert served.keys() == Limits.model_fields.keys()
    assert served["live_jobs"]["in_use"] == 1
    assert served["vector_numbers"]["value"] == 2_097_152


def test_an_account_may_not_have_too_many_unfinished_jobs(
    database_url: str, redis_url: str, tmp_path: Path, builders: Builders
) -> None:
    settings = settings_for(
        tmp_path, database_url=database_url, redis_url=redis_url, limits=Limits(live_jobs=2)
    )
    account_id, key = a_key(builders.database)
    headers = {"authorization": f"Bearer {key}"}
    with TestClient(create_app(settings), headers=headers) as client:
        api = Api(client, builders.database, account_id, key)
        ids = [api.submit().json()["id"] for _ in range(2)]
        before = api.numbers()
        refused = api.submit()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many_live_jobs"
        assert int(refused.headers["retry-after"]) > 0
        assert api.numbers() == before
        assert len(ids) == 2


def test_ready_means_that_a_worker_is(api: Api, builders: Builders) -> None:
    assert api.client.get("/healthz").json() == {"status": "ok"}
    waiting = api.client.get("/readyz")
    assert waiting.status_code == 503
    assert waiting.json()["error"]["code"] == "not_ready"
    assert waiting.json()["checks"]["redis"] == "ok"
    builders.a_worker()
    ready = api.client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["checks"]["workers_ready"] == {"tiny": 1}


def test_every_answer_has_an_id_of_its_own(api: Api) -> None:
    answers = [api.client.get(path) for path in ("/healthz", "/v1/jobs", "/nope", "/healthz")]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 4
    assert all(re.fullmatch(r"req_[0-9a-f]{32}", request_id) for request_id in ids)
    assert answers[2].json()["request_id"] == ids[2]


def test_a_fault_of_ours_is_logged_once_and_says_nothing_but_its_id(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    api.client.app.state.catalog = None  # type: ignore[attr-defined]
    with caplog.at_level(logging.ERROR):
        answer = api.client.get("/v1/models")
    content = answer.json()
    assert answer.status_code == 500
    assert content["error"]["code"] == "internal_error"
    assert "NoneType" not in answer.text
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [vars(record)["request_id"] for record in errors] == [content["request_id"]]


def test_jobs_are_taken_while_redis_is_down(
    database_url: str, tmp_path: Path, builders: Builders
) -> None:
    settings = settings_for(tmp_path, database_url=database_url)
    account_id, key = a_key(builders.database)
    headers = {"authorization": f"Bearer {key}"}
    with TestClient(create_app(settings), headers=headers) as client:
        api = Api(client, builders.database, account_id, key)
        assert api.submit().status_code == 202
        assert client.get("/readyz").json()["checks"]["redis"] == "down"


def test_without_postgres_the_answer_is_to_try_again(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = EmbeddedPostgres(tmp_path_factory.mktemp("gone"))
    server.start()
    settings = settings_for(tmp_path, database_url=server.url, database_connections=1)
    headers = {"authorization": f"Bearer {mint_key()}"}
    with TestClient(create_app(settings)) as client, ThreadPoolExecutor() as threads:
        server.stop()
        readiness = threads.submit(client.get, "/readyz")
        refused = client.get("/v1/jobs", headers=headers)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"
        assert int(refused.headers["retry-after"]) > 0
        assert readiness.result().status_code == 503
        assert readiness.result().json()["checks"]["postgres"] == "down"
        assert client.get("/healthz").status_code == 200
