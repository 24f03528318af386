"""What the routes of manifests and files answer, for the OpenAPI document."""

from typing import Any, Final

from app.jobs.openapi import COUNTS, JOB_ID, JOB_STATE, USAGE
from app.kit.openapi import (
    COUNT,
    ETAG,
    FLAG,
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
    ref,
)

_BYTES: Final[Schema] = {"type": "string", "format": "binary"}
_MEDIA: Final = "application/vnd.apache.parquet"
_SHA256: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_RANGE: Final[Schema] = {
    "name": "Range",
    "in": "header",
    "required": False,
    "schema": STRING,
    "description": "One range of bytes.",
}

_FILE: Final[Schema] = closed(
    {
        "path": STRING,
        "kind": {"enum": ["results", "activations", "captures", "stats"]},
        "rows": nullable(COUNT),
        "bytes": COUNT,
        "sha256": _SHA256,
        "layer": nullable(COUNT),
        "capture": nullable(STRING),
        "site": nullable(STRING),
        "when": {"enum": ["after", "before", None]},
        "reduce": nullable(STRING),
        "width": nullable(COUNT),
        "first_index": nullable(COUNT),
        "end_index": nullable(COUNT),
    }
)
_MANIFEST: Final[Schema] = closed(
    {
        "object": {"const": "job.manifest"},
        "schema_version": {"type": ["integer", "string"]},
        "job_id": JOB_ID,
        "version": COUNT,
        "sequence": COUNT,
        "complete": FLAG,
        "status": JOB_STATE,
        "created_at": SECONDS,
        "started_at": nullable(SECONDS),
        "ended_at": nullable(SECONDS),
        "counts": closed(COUNTS),
        "usage": USAGE,
        "accounting": closed(dict.fromkeys(("queued", "running", "total"), nullable(NUMBER))),
        "model": closed(
            {
                "id": STRING,
                "revision": STRING,
                "hidden_size": nullable(COUNT),
                "n_layers": nullable(COUNT),
                "dtype": STRING,
            }
        ),
        "engine": nullable(STRING),
        "bytes": COUNT,
        "root_sha256": _SHA256,
        "files": items(ref("ManifestFile")),
    }
)

SCHEMAS: Final[dict[str, Schema]] = {"Manifest": _MANIFEST, "ManifestFile": _FILE}

MANIFEST: Final[dict[str, Any]] = documented(
    {
        200: answer(
            "The manifest.",
            ref("Manifest"),
            headers={"etag": ETAG},
            links={
                "get_file": leads_to(
                    "get_file",
                    job_id="$response.body#/job_id",
                    path="$response.body#/files/0/path",
                )
            },
        ),
        304: answer("It is as it was.", headers={"etag": ETAG}),
    }
)
FILE: Final[dict[str, Any]] = documented(
    {
        200: answer("The file.", _BYTES, media=_MEDIA, headers={"etag": ETAG}),
        206: answer("The range of the file.", _BYTES, media=_MEDIA, headers={"etag": ETAG}),
        302: answer("A link that works for an hour.", headers={"location": header("The link.")}),
        304: answer("It is as it was.", headers={"etag": ETAG}),
    },
    parameters=(_RANGE,),
)
