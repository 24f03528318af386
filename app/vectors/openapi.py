"""What the routes of stored vectors take and answer, for the OpenAPI document."""

from typing import Any, Final

from app.completions.openapi import VECTOR
from app.jobs.openapi import TEXTS
from app.kit.openapi import (
    COUNT,
    ETAG,
    FLAG,
    IDEMPOTENCY_KEY,
    JSON,
    NUMBER,
    SECONDS,
    STRING,
    Schema,
    answer,
    closed,
    documented,
    header,
    items,
    leads_to,
    nullable,
    page_of,
    page_queries,
    query,
    ref,
    sendable,
)

VECTOR_ID: Final[Schema] = {"type": "string", "pattern": "^sv_[0-9a-f]{64}$"}
_BYTES: Final[Schema] = {"type": "string", "format": "binary"}
_NUMBERS: Final[Schema] = {
    "anyOf": [form for form in VECTOR["anyOf"] if form.get("type") != "string"]
}

_FIELDS: Final[dict[str, Schema]] = {
    "id": VECTOR_ID,
    "object": {"const": "steering_vector"},
    "name": nullable(STRING),
    "dtype": {"enum": ["float32", "bfloat16"]},
    "shape": items(COUNT, minItems=1, maxItems=3),
    "bytes": COUNT,
    "interned": FLAG,
    "metadata": TEXTS,
    "created_at": SECONDS,
}
SCHEMAS: Final[dict[str, Schema]] = {
    "StoredVector": closed(_FIELDS),
    "StoredVectorWhole": closed(
        {**_FIELDS, "rows": COUNT, "norms": items(NUMBER), "largest": NUMBER}
    ),
    "NewVector": sendable(
        {"activations": _NUMBERS, "name": STRING, "metadata": TEXTS}, required=("activations",)
    ),
}


def vector_links(vector_id: str) -> dict[str, Schema]:
    """Say what can be done with the vector whose id stands at `vector_id` of an answer."""
    operations = ("get_vector", "get_content", "delete_vector")
    return {name: leads_to(name, vector_id=vector_id) for name in operations}


_LINKS: Final = vector_links("$response.body#/id")
_LOCATION: Final = {"location": header("Where the vector is.")}
_FORM: Final[Schema] = {
    "type": "object",
    "properties": {
        "file": _BYTES,
        "name": STRING,
        "tensor": STRING,
        "metadata": {"type": "string", "description": "A JSON object of texts."},
    },
    "required": ["file"],
    "additionalProperties": False,
}
CREATE_VECTOR: Final[dict[str, Any]] = documented(
    {
        201: answer("The vector is stored.", ref("StoredVector"), headers=_LOCATION, links=_LINKS),
        200: answer(
            "These numbers were stored before.",
            ref("StoredVector"),
            headers=_LOCATION,
            links=_LINKS,
        ),
    },
    body={
        "required": True,
        "content": {
            JSON: {"schema": ref("NewVector")},
            "multipart/form-data": {"schema": _FORM},
            "application/octet-stream": {"schema": _BYTES},
            "application/x-npy": {"schema": _BYTES},
            "application/vnd.safetensors": {"schema": _BYTES},
        },
    },
    parameters=(
        IDEMPOTENCY_KEY,
        query("name", STRING, "The vector's name, beside a file."),
        query("tensor", STRING, "Which tensor of a .safetensors file."),
    ),
)
LIST_VECTORS: Final[dict[str, Any]] = documented(
    {
        200: answer(
            "A page of vectors.",
            page_of(ref("StoredVector")),
            links=vector_links("$response.body#/data/0/id"),
        )
    },
    parameters=(
        *page_queries(newest=True),
        query("interned", FLAG, "true: only those that Jobs brought along; false: uploads."),
    ),
)
READ_VECTOR: Final[dict[str, Any]] = documented(
    {200: answer("The vector.", ref("StoredVectorWhole"), links=_LINKS)}
)
READ_CONTENT: Final[dict[str, Any]] = documented(
    {
        200: answer(
            "A .npy file of float32.",
            _BYTES,
            media="application/x-npy",
            headers={"etag": ETAG},
        ),
        304: answer("It is as it was.", headers={"etag": ETAG}),
    }
)
DELETE_VECTOR: Final[dict[str, Any]] = documented(
    {
        200: answer(
            "The vector is deleted.",
            closed({"id": VECTOR_ID, "object": {"const": "steering_vector"}, "deleted": FLAG}),
        )
    }
)
