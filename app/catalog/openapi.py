"""What the routes of models answer, for the OpenAPI document."""

from typing import Any, Final

from app.kit.openapi import (
    COUNT,
    NUMBER,
    SECONDS,
    STRING,
    Schema,
    answer,
    closed,
    documented,
    nullable,
    page_of,
    ref,
)

_SITE: Final[Schema] = closed({"width": COUNT, "heads": COUNT}, optional=frozenset({"heads"}))
SCHEMAS: Final[dict[str, Schema]] = {
    "Model": closed(
        {
            "id": STRING,
            "object": {"const": "model"},
            "created": SECONDS,
            "owned_by": STRING,
            "revision": STRING,
            "architecture": STRING,
            "capabilities": closed(
                {
                    "hidden_size": COUNT,
                    "n_layers": COUNT,
                    "max_model_len": COUNT,
                    "max_logprobs": COUNT,
                    "dtype": STRING,
                    "sites": {"type": "object", "additionalProperties": _SITE},
                    "vocab_size": COUNT,
                }
            ),
            "queue": closed(
                {
                    "workers_ready": COUNT,
                    "workers_starting": COUNT,
                    "tokens_per_second": nullable(NUMBER),
                    "jobs_live": COUNT,
                    "requests_pending": COUNT,
                    "requests_running": COUNT,
                    "oldest_job_seconds": nullable(NUMBER),
                }
            ),
        }
    )
}

LIST_MODELS: Final[dict[str, Any]] = documented({200: answer("The models.", page_of(ref("Model")))})
READ_MODEL: Final[dict[str, Any]] = documented({200: answer("The model.", ref("Model"))})
