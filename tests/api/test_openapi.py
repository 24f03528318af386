"""The OpenAPI document: whole, sound, and about the fields that the validators know.

That answers and taken requests are as described is checked by every test that uses the API.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from app.completions import at, interventions, rows_of, steering, tensors, tokenize
from app.completions.validate import OTHER_FIELDS, Validator
from app.vectors.upload import FORM_FIELDS, JSON_FIELDS
from tests.fixtures.api import Api
from tests.fixtures.documented import Described

REF = "#/components/schemas/"


@pytest.fixture
def document(api: Api) -> dict[str, Any]:
    answer = api.client.get("/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from nodes(item)
    elif isinstance(value, list):
        for item in value:
            yield from nodes(item)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_every_route_is_in_the_document(api: Api, document: dict[str, Any]) -> None:
    routes = {
        f"{method} {route.path_format}"
        for route in api.client.app.routes  # type: ignore[attr-defined]
        if isinstance(route, Route) and not route.path.startswith("/openapi")
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert routes == {name for name, _ in operations(document)}
    assert len(routes) >= 20


def test_every_reference_leads_somewhere_and_every_schema_is_used(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    used = {node["$ref"] for node in nodes(document) if "$ref" in node}
    assert used == {REF + name for name in schemas}
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


def test_every_operation_describes_its_answers_and_its_body(document: dict[str, Any]) -> None:
    without_body = {"POST /v1/jobs/{job_id}/cancel", "POST /v1/chat/completions"}
    for name, operation in operations(document):
        answers = operation["responses"]
        assert {"4XX", "5XX"} <= answers.keys(), name
        assert "422" not in answers, f"{name}: FastAPI's own 422 is never given"
        for status, answer in answers.items():
            told = [media.get("schema") for media in answer.get("content", {}).values()]
            assert all(told), f"{name} {status}"
            assert told or status in ("302", "304"), f"{name} {status}"
        expected = name.startswith("POST") and name not in without_body
        assert ("requestBody" in operation) == expected, name
        is_open = name in ("GET /healthz", "GET /readyz", "GET /metrics")
        assert ("security" in operation) != is_open, name


def test_every_answer_tells_of_its_id(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        for status, answer in operation["responses"].items():
            assert answer["headers"]["x-request-id"]["required"], f"{name} {status}"


def test_every_link_leads_to_an_operation_and_fills_its_path(document: dict[str, Any]) -> None:
    known = {operation["operationId"]: operation for _, operation in operations(document)}
    assert len(known) == len(list(operations(document))), "an operationId comes twice"
    count = 0
    for name, operation in operations(document):
        for answer in operation["responses"].values():
            for link in answer.get("links", {}).values():
                target = known[link["operationId"]]
                places = {item["name"]: item["in"] for item in target.get("parameters", ())}
                in_path = {item for item, place in places.items() if place == "path"}
                assert in_path <= link["parameters"].keys() <= places.keys(), name
                count += 1
    assert count > 20


def test_bodies_have_the_fields_that_validators_know(api: Api, document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    catalog = api.client.app.state.catalog  # type: ignore[attr-defined]
    limits = api.client.app.state.settings.limits  # type: ignore[attr-defined]
    validator = Validator(
        catalog.get("tiny"), catalog.tokenizer("tiny"), limits, stored={}, is_job=False
    )
    content = document["paths"]["/v1/tokenize"]["post"]["requestBody"]["content"]
    form = document["paths"]["/v1/steering_vectors"]["post"]["requestBody"]["content"]
    fields = {name: set(schema.get("properties", ())) for name, schema in schemas.items()}
    assert set(OTHER_FIELDS) < fields["RequestBody"] == validator.fields
    assert fields["SteeringVector"] == steering.FIELDS
    assert fields["Intervention"] == interventions.COMMON.union(*interventions.OWN.values())
    assert fields["CapturedRows"] == rows_of.FIELDS
    assert fields["At"] == at.FIELDS
    assert fields["EncodedVector"] == set(tensors.ENCODED_FIELDS)
    assert fields["NewVector"] == JSON_FIELDS
    assert set(form["multipart/form-data"]["schema"]["properties"]) == FORM_FIELDS
    assert set(content["application/json"]["schema"]["properties"]) == tokenize.FIELDS


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/v1/usage", 200, {"object": "usage"}),
        ("GET", "/v1/usage", 401, {"detail": "no"}),
        ("GET", "/v1/usage", 302, None),
        ("GET", "/nowhere", 404, {"detail": "Not Found"}),
        ("GET", "/healthz", 200, {"status": "ok", "more": 1}),
        ("GET", "/healthz?loud=1", 200, {"status": "ok"}),
    ],
)
def test_an_answer_that_is_not_described_is_noticed(
    api: Api, method: str, path: str, status: int, body: Any
) -> None:
    described = Described(api.client.app)  # type: ignore[arg-type]
    request = httpx.Request(method, f"http://testserver{path}")
    content = b"" if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    with pytest.raises(AssertionError):
        described(httpx.Response(status, headers=headers, content=content, request=request))


def test_a_request_that_was_taken_but_is_not_described_is_noticed(api: Api) -> None:
    described = Described(api.client.app)  # type: ignore[arg-type]
    found = api.client.post("/v1/tokenize", json={"model": "tiny", "prompt": "a"})
    for sent in ({"model": "tiny"}, {"model": "tiny", "prompt": "a", "more": 1}):
        request = httpx.Request("POST", "http://testserver/v1/tokenize", json=sent)
        with pytest.raises(AssertionError, match="what was sent"):
            described(
                httpx.Response(200, headers=found.headers, content=found.content, request=request)
            )
