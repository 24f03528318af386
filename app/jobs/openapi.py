"""What the routes of Jobs take and answer, for the OpenAPI document."""

from typing import Any, Final

from app.completions.openapi import COMPLETION_FIELDS
from app.jobs.schemas import FIELDS, PRIORITIES
from app.jobs.states import JobState, RequestState
from app.kit.openapi import (
    COUNT,
    ETAG,
    FLAG,
    IDEMPOTENCY_KEY,
    NUMBER,
    SECONDS,
    STRING,
    WHOLE,
    Schema,
    answer,
    closed,
    documented,
    header,
    items,
    json_body,
    leads_to,
    nullable,
    page_of,
    page_queries,
    query,
    ref,
    sendable,
)

JOB_ID: Final[Schema] = {"type": "string", "pattern": "^job_[0-9a-f]{32}$"}
TEXTS: Final[Schema] = {"type": "object", "additionalProperties": STRING}
REQUEST_STATE: Final[Schema] = {"enum": [state.value for state in RequestState]}
JOB_STATE: Final[Schema] = {"enum": [state.value for state in JobState]}
CODED: Final[Schema] = closed({"code": STRING, "message": STRING})
REVALIDATE: Final[Schema] = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "schema": STRING,
    "description": "An ETag of before; 304 says that nothing has changed since.",
}

_BODY: Final[Schema] = sendable(COMPLETION_FIELDS)
_JOB_REQUEST: Final[Schema] = {
    "description": "A completions body and a name for it, side by side or one in the other.",
    "anyOf": [
        sendable({**COMPLETION_FIELDS, "custom_id": STRING}),
        sendable({"custom_id": STRING, "body": ref("RequestBody")}, required=("body",)),
    ],
}
_NEW_JOB: Final[Schema] = sendable(
    {
        "model": STRING,
        "requests": items(ref("NewJobRequest"), minItems=1),
        "defaults": ref("RequestBody"),
        "name": STRING,
        "metadata": TEXTS,
        "priority": {"enum": list(PRIORITIES)},
        "expires_in": {"type": "integer", "description": "Life of the Job in seconds."},
        "reproducible": FLAG,
    },
    required=("model", "requests"),
)
assert _NEW_JOB["properties"].keys() == FIELDS

COUNTS: Final[dict[str, Schema]] = dict.fromkeys(
    ("total", "pending", "running", "succeeded", "errored", "cancelled", "expired"), COUNT
)
USAGE: Final[Schema] = closed(
    dict.fromkeys(
        ("prompt_tokens", "completion_tokens", "total_tokens", "held", "charged", "released"), COUNT
    )
)
_PARTS: Final = ("queued", "engine_start", "running", "publishing", "rest", "total")

_JOB: Final[Schema] = closed(
    {
        "id": JOB_ID,
        "object": {"const": "job"},
        "status": JOB_STATE,
        "outcome": {"enum": ["none_succeeded", "some_succeeded", "all_succeeded", None]},
        "status_reason": nullable(CODED),
        "name": nullable(STRING),
        "metadata": TEXTS,
        "priority": {"enum": list(PRIORITIES)},
        "model": STRING,
        "model_revision": STRING,
        "dtype": STRING,
        "engine": nullable(STRING),
        "endpoint": STRING,
        "reproducible": FLAG,
        "version": COUNT,
        "sequence": COUNT,
        "created_at": SECONDS,
        "started_at": nullable(SECONDS),
        "cancel_requested_at": nullable(SECONDS),
        "finished_at": nullable(SECONDS),
        "expires_at": SECONDS,
        "request_counts": closed({**COUNTS, "completed": COUNT, "failed": COUNT}),
        "progress": closed(
            {
                "percent": NUMBER,
                "tokens_per_second": nullable(NUMBER),
                "eta_seconds": nullable(WHOLE),
                "queue_position": nullable(COUNT),
            }
        ),
        "usage": USAGE,
        "accounting": closed(dict.fromkeys(_PARTS, NUMBER)),
        "error_summary": items(
            closed(
                {
                    "code": STRING,
                    "count": COUNT,
                    "example_index": COUNT,
                    "example_message": nullable(STRING),
                }
            )
        ),
        "links": closed(dict.fromkeys(("self", "requests", "manifest", "cancel"), STRING)),
    }
)

_REQUEST_FIELDS: Final[dict[str, Schema]] = {
    "id": STRING,
    "object": {"const": "job.request"},
    "job_id": JOB_ID,
    "request_index": COUNT,
    "custom_id": nullable(STRING),
    "status": REQUEST_STATE,
    "version": COUNT,
    "attempt": nullable(COUNT),
    "prompt_tokens": nullable(COUNT),
    "completion_tokens": nullable(COUNT),
    "tokens_held": nullable(COUNT),
    "error": nullable(CODED),
    "finished_at": nullable(SECONDS),
}
_REQUEST_WHOLE: Final[Schema] = closed(
    {
        **_REQUEST_FIELDS,
        "hold": closed(
            {
                "amount": nullable(COUNT),
                "state": {"enum": ["open", "settled", "released"]},
                "charged": COUNT,
            }
        ),
        "spec": {"type": "object", "description": "What runs: the request after validation."},
    }
)


def job_links(job_id: str) -> dict[str, Schema]:
    """Say what can be done with the Job whose id stands at `job_id` of an answer."""
    operations = ("get_job", "cancel_job", "get_requests", "get_manifest")
    return {name: leads_to(name, job_id=job_id) for name in operations}


_LINKS: Final = job_links("$response.body#/id")
_REQUEST_OF_JOB: Final = leads_to("get_request", job_id="$response.body#/id", index="0")

SCHEMAS: Final[dict[str, Schema]] = {
    "RequestBody": _BODY,
    "NewJobRequest": _JOB_REQUEST,
    "NewJob": _NEW_JOB,
    "Job": _JOB,
    "JobRequest": closed(_REQUEST_FIELDS),
    "JobRequestWhole": _REQUEST_WHOLE,
}

CREATE_JOB: Final[dict[str, Any]] = documented(
    {
        202: answer(
            "The Job is stored and its tokens are held.",
            ref("Job"),
            headers={"location": header("Where the Job is.")},
            links={**_LINKS, "get_request": _REQUEST_OF_JOB},
        )
    },
    body=json_body(ref("NewJob")),
    parameters=(IDEMPOTENCY_KEY,),
)
LIST_JOBS: Final[dict[str, Any]] = documented(
    {
        200: answer(
            "A page of Jobs.",
            page_of(ref("Job")),
            links=job_links("$response.body#/data/0/id"),
        )
    },
    parameters=(
        *page_queries(newest=True),
        query("status", JOB_STATE, "Only Jobs of this status."),
        query("model", STRING, "Only Jobs of this model."),
    ),
)
READ_JOB: Final[dict[str, Any]] = documented(
    {
        200: answer("The Job.", ref("Job"), headers={"etag": ETAG}, links=_LINKS),
        304: answer("It is as it was.", headers={"etag": ETAG}),
    },
    parameters=(
        query("wait", COUNT, "Answer when it changes or ends, after so many seconds at most."),
        REVALIDATE,
    ),
)
CANCEL_JOB: Final[dict[str, Any]] = documented({200: answer("The Job.", ref("Job"), links=_LINKS)})
LIST_REQUESTS: Final[dict[str, Any]] = documented(
    {
        200: answer(
            "A page of requests.",
            page_of(ref("JobRequest")),
            links={
                "get_request": leads_to(
                    "get_request",
                    job_id="$response.body#/data/0/job_id",
                    index="$response.body#/data/0/request_index",
                )
            },
        )
    },
    parameters=(
        *page_queries(newest=False),
        query("status", REQUEST_STATE, "Only requests of this status."),
        query("custom_id", STRING, "Only the request of this name."),
    ),
)
READ_REQUEST: Final[dict[str, Any]] = documented(
    {200: answer("The request.", ref("JobRequestWhole"))}
)
LIMITS: Final[dict[str, Any]] = documented(
    {
        200: answer(
            "Every limit.",
            closed(
                {
                    "object": {"const": "list"},
                    "data": items(
                        closed(
                            {
                                "id": STRING,
                                "value": WHOLE,
                                "in_use": nullable(COUNT),
                                "description": STRING,
                            }
                        )
                    ),
                    "has_more": FLAG,
                }
            ),
        )
    }
)
