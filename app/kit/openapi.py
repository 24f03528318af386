"""The pieces that every feature's part of the OpenAPI document is made of.

Routes read and write raw bytes, so FastAPI cannot know what is in them: each feature describes
its bodies and answers as plain schemas in its module openapi.py, and a test holds every answer of
every other test against them. Limits are settings, so the document has none: GET /v1/limits.
"""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

Schema = dict[str, Any]

STRING: Final[Schema] = {"type": "string"}
WHOLE: Final[Schema] = {"type": "integer"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
NUMBER: Final[Schema] = {"type": "number"}
FLAG: Final[Schema] = {"type": "boolean"}
SECONDS: Final[Schema] = {"type": "integer", "description": "Unix time in seconds."}
JSON: Final = "application/json"
BEARER: Final = {"type": "http", "scheme": "bearer", "description": "A key, sk_live_…"}
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics"})


def ref(name: str) -> Schema:
    """Point to a schema among the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    """Allow null beside `schema`; in a body it means that the field was not sent."""
    return {"anyOf": [schema, {"type": "null"}]}


def items(schema: Schema, **rules: Any) -> Schema:
    """Describe a list of `schema`."""
    return {"type": "array", "items": schema, **rules}


def closed(properties: Mapping[str, Schema], *, optional: frozenset[str] = frozenset()) -> Schema:
    """Describe an answer's object: all properties but `optional` ones are there, and no more."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def sendable(properties: Mapping[str, Schema], *, required: tuple[str, ...] = ()) -> Schema:
    """Describe a body's object: null stands for each property that is not required."""
    return {
        "type": "object",
        "properties": {
            name: schema if name in required else nullable(schema)
            for name, schema in properties.items()
        },
        "required": list(required),
        "additionalProperties": False,
    }


def page_of(schema: Schema) -> Schema:
    """Describe a page of a list (kit/pages.py)."""
    return closed(
        {
            "object": {"const": "list"},
            "data": items(schema),
            "first_id": nullable(STRING),
            "last_id": nullable(STRING),
            "has_more": FLAG,
        }
    )


def answer(
    description: str,
    schema: Schema | None = None,
    *,
    media: str = JSON,
    headers: Mapping[str, Schema] | None = None,
    links: Mapping[str, Schema] | None = None,
) -> Schema:
    """Describe an answer; without a schema it has no body."""
    described: Schema = {"description": description}
    if schema is not None:
        described["content"] = {media: {"schema": schema}}
    if headers:
        described["headers"] = dict(headers)
    if links:
        described["links"] = dict(links)
    return described


def header(description: str, schema: Schema = STRING) -> Schema:
    """Describe a header that the answer always has."""
    return {"description": description, "required": True, "schema": schema}


def leads_to(operation: str, **parameters: str) -> Schema:
    """Describe a link: `operation` is the name of an endpoint's function.

    The values are constants or runtime expressions, as "$response.body#/id".
    """
    return {"operationId": operation, "parameters": parameters}


def operation_id(route: APIRoute) -> str:
    """Name an operation after its function, so that links and generated clients are readable."""
    return route.name


def json_body(schema: Schema) -> Schema:
    """Describe a body that must be JSON."""
    return {"required": True, "content": {JSON: {"schema": schema}}}


def query(name: str, schema: Schema, description: str) -> Schema:
    """Describe a query parameter that may be left out."""
    return {
        "name": name,
        "in": "query",
        "required": False,
        "schema": schema,
        "description": description,
    }


def page_queries(*, newest: bool) -> tuple[Schema, ...]:
    """Describe the query parameters of a list (kit/pages.py)."""
    orders = ["asc", "desc"] if newest else ["asc"]
    return (
        query(
            "limit", {"type": "integer", "minimum": 1}, "Most items of the page; 20 if not sent."
        ),
        query("after", STRING, "The id of the last item of the page before."),
        query("order", {"enum": orders}, f"{'desc' if newest else 'asc'} if not sent."),
    )


ETAG: Final[Schema] = header("Send it as If-None-Match: 304 says that nothing has changed.")
IDEMPOTENCY_KEY: Final[Schema] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[ -~]+$"},
    "description": "The same key and body again give the first answer and do nothing.",
}


def documented(
    answers: Mapping[int, Schema],
    *,
    body: Schema | None = None,
    parameters: tuple[Schema, ...] = (),
) -> dict[str, Any]:
    """Give the keyword arguments of a route that describe it."""
    extra: Schema = {}
    if body is not None:
        extra["requestBody"] = body
    if parameters:
        extra["parameters"] = [dict(parameter) for parameter in parameters]
    return {"responses": dict(answers), "openapi_extra": extra or None}


ERROR: Final[Schema] = closed(
    {
        "error": closed(
            {
                "message": STRING,
                "type": STRING,
                "param": nullable(STRING),
                "code": STRING,
                "total": COUNT,
                "details": items(
                    closed(
                        {
                            "index": nullable(COUNT),
                            "param": nullable(STRING),
                            "code": STRING,
                            "message": STRING,
                        }
                    )
                ),
            },
            optional=frozenset({"total", "details"}),
        ),
        "request_id": {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
    }
)
# Of every route: what is wrong with a request, and what may be wrong with the service.
REQUEST_ID: Final[Schema] = header(
    "Name it when you ask about this answer.",
    {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
)
FAILURES: Final[dict[int | str, Schema]] = {
    "4XX": answer("The request is refused; nothing has changed.", ref("Error")),
    "5XX": answer("The service cannot do it now, or is at fault.", ref("Error")),
}


def describe(app: FastAPI, schemas: Mapping[str, Schema]) -> None:
    """Make `app` serve its OpenAPI document with `schemas` among the components."""
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(_document(app, schemas))
        return made

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, schemas: Mapping[str, Schema]) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = found.setdefault("components", {})
    # FastAPI's own schemas are of a 422 that this service never gives.
    components["schemas"] = {"Error": ERROR, **schemas}
    components["securitySchemes"] = {"key": BEARER}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            if path not in OPEN_PATHS:
                operation["security"] = [{"key": []}]
            for described in operation["responses"].values():
                _leave_out_empty(described)
                described.setdefault("headers", {})["x-request-id"] = REQUEST_ID
    return found


def _leave_out_empty(described: Schema) -> None:
    """Take away the JSON that FastAPI expects of an answer that no schema tells of."""
    content = described.get("content", {})
    if not content.get(JSON, {"schema": True}).get("schema"):
        del content[JSON]
    if not content:
        described.pop("content", None)
