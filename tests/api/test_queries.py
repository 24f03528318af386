"""A parameter that a route does not have is refused by name, on every route."""

import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.main import ROUTERS
from app.query import parameters_of
from tests.fixtures.api import Api

ROUTES = [
    (method, route)
    for router in ROUTERS
    for route in router.routes
    for method in sorted(route.methods)  # type: ignore[attr-defined]
]
OURS = [each for each in ROUTES if each[1].path.startswith("/v1/")]  # type: ignore[attr-defined]


def named(each: tuple[str, Any]) -> str:
    """Name a route in the report of a test."""
    return f"{each[0]} {each[1].path}"


@pytest.mark.parametrize("asked", OURS, ids=named)
def test_a_parameter_that_a_route_does_not_have_is_named(
    shared_api: Api, asked: tuple[str, Any]
) -> None:
    method, route = asked
    path = re.sub(r"\{[^}]*\}", "x", route.path)
    before = shared_api.numbers()
    answer = shared_api.client.request(method, path, params={"staus": "running"})
    assert answer.status_code == 400
    if method != "HEAD":
        error = answer.json()["error"]
        assert error["param"] == "staus"
        known = parameters_of(route)
        hint = "Did you mean 'status'?" if "status" in known else "Leave it out."
        assert error["message"] == f"This route's query has no field 'staus'. {hint}"
    assert shared_api.numbers() == before


@pytest.mark.parametrize("asked", OURS, ids=named)
def test_what_the_document_names_is_known(shared_api: Api, asked: tuple[str, Any]) -> None:
    method, route = asked
    paths = shared_api.client.get("/openapi.json").json()["paths"]
    described = paths[re.sub(r":[a-z]+\}", "}", route.path)].get(method.lower())
    if described is not None:
        listed = {p["name"] for p in described.get("parameters", []) if p["in"] == "query"}
        assert listed == parameters_of(route)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/openapi.json"])
def test_machines_may_ask_as_they_like(shared_api: Api, path: str) -> None:
    client = TestClient(shared_api.client.app)  # without the check that a query is documented
    assert client.get(path, params={"t": "1"}).status_code != 400
