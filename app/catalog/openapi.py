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
    items,
    leads_to,
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
                    "typical_norms": {
                        **nullable(items(NUMBER)),
                        "description": "By layer, how long a row of the residual stream (what "
                        "leaves the layer) typically is: the mean of some prompts' median norms, "
                        "the first position left out; null until a worker has measured it.",
                    },
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

LIST_MODELS: Final[dict[str, Any]] = documented(
    {
        200: answer(
            "The models.",
            page_of(ref("Model")),
            links={"get_model": leads_to("get_model", name="$response.body#/data/0/id")},
        )
    }
)
READ_MODEL: Final[dict[str, Any]] = documented({200: answer("The model.", ref("Model"))})
