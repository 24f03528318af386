"""Every link of the document, followed from a real answer: what it names is there."""

from typing import Any

import httpx
import pytest

from tests.openapi_fuzz.service import Service

Operation = tuple[str, str, dict[str, Any]]  # method, path, description
PLAIN = {"model": "tiny", "requests": [{"prompt": "abc", "max_tokens": 1}]}


@pytest.fixture
def client(service: Service):
    with service.client() as found:
        yield found


def operations(service: Service) -> dict[str, Operation]:
    paths = service.app.openapi()["paths"]
    return {
        operation["operationId"]: (method, path, operation)
        for path, methods in paths.items()
        for method, operation in methods.items()
    }


def answers(service: Service, client: httpx.Client, name: str) -> list[httpx.Response]:
    """Call an operation that has links, once for each way it succeeds."""
    method, path, _ = operations(service)[name]
    if name == "create_job":
        return [client.post(path, json=PLAIN)]
    if name == "create_vector":
        # New numbers, and the same again.
        body = {"activations": [0.25, 0.5, 0.125]}
        return [client.post(path, json=body), client.post(path, json=body)]
    there = {"job_id": service.job_id, "vector_id": service.vector_id}
    return [client.request(method, path.format(**there))]


def value_of(expression: str, answer: httpx.Response) -> str:
    """Read a runtime expression out of an answer; a constant is itself."""
    start, _, pointer = expression.partition("#/")
    if not pointer:
        return expression
    assert start == "$response.body"
    found = answer.json()
    for step in pointer.split("/"):
        found = found[int(step)] if isinstance(found, list) else found[step]
    return str(found)


def test_every_link_of_every_answer_leads_to_what_it_names(
    service: Service, client: httpx.Client
) -> None:
    known = operations(service)
    followed = 0
    for name, (_, _, operation) in known.items():
        linked = {
            status: found["links"]
            for status, found in operation["responses"].items()
            if "links" in found
        }
        if not linked:
            continue
        seen = answers(service, client, name)
        assert {str(answer.status_code) for answer in seen} == linked.keys(), name
        for answer in seen:
            links = linked[str(answer.status_code)]
            # What is deleted is asked for last, and only if it was made here.
            for key in sorted(links, key=lambda key: key.startswith("delete")):
                link = links[key]
                method, path, _ = known[link["operationId"]]
                if method == "delete" and (name, answer.status_code) != ("create_vector", 200):
                    continue
                values = {
                    field: value_of(expression, answer)
                    for field, expression in link["parameters"].items()
                }
                found = client.request(method, path.format(**values))
                assert found.is_success, f"{name} -> {key}: {found.status_code} {found.text}"
                followed += 1
    assert followed > 20
