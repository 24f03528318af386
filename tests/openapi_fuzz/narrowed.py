"""The OpenAPI document with what one server adds to it: its model, its width, its layers.

The document is the same for all servers, so what a model allows is not in it, and bodies drawn
from it alone are nearly all refused. Here a body is one of some that mostly run (plain, steered,
reading; about every second Completion as a stream) or any that the document allows.
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from app.kit.openapi import Schema, closed, items, nullable, ref
from tests.fixtures.tiny_model import CONTEXT, HIDDEN_SIZE, N_LAYERS, VOCAB_SIZE
from tiller.tensors import encode

MODEL = "tiny"
PROMPT_MAX = 8  # characters of up to four bytes, each a token
TOKENS_MAX = 6
FINISHED_PROMPT = [6, 7, 8]  # of the Job that rows are taken from
assert PROMPT_MAX * 4 + 1 + TOKENS_MAX < CONTEXT

JOB_FIELDS = {
    "name": {"type": "string", "pattern": r"^[^\x00]{1,40}$"},
    "metadata": {
        "type": "object",
        "maxProperties": 3,
        "propertyNames": {"pattern": "^[a-z]{1,20}$"},
        "additionalProperties": {"type": "string", "pattern": r"^[^\x00]{0,20}$"},
    },
    "priority": {"enum": ["interactive", "standard", "background"]},
    "expires_in": {"enum": [60, 3600]},
    "reproducible": {"type": "boolean"},
}
EVENTS = "text/event-stream"
EVENT: Schema = {
    "type": "object",
    "properties": {"data": {"type": "string", "minLength": 2}},
    "required": ["data"],
}
CUSTOM_ID: Schema = {"type": "string", "pattern": "^[a-z0-9]{1,12}$"}


def with_model(document: Schema) -> Schema:
    """Give a copy in which every body names the model of the tests."""
    found: Schema = copy.deepcopy(document)
    schemas, paths = found["components"]["schemas"], found["paths"]
    bodies = [
        paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path in ("/v1/completions", "/v1/tokenize")
    ]
    for body in (*bodies, schemas["NewJob"]):
        body["properties"]["model"] = {"const": MODEL}
    _tell_events(found)
    return found


def narrowed(document: Schema, *, job_id: str, path: str, vector_id: str) -> Schema:
    """Give a copy for a server of the tests' model that has this Job and this stored vector.

    The Job has finished, has the file `path`, and has read Layer 1 of its request 0, which had
    FINISHED_PROMPT.
    """
    found: Schema = copy.deepcopy(document)
    _tell_events(found)
    schemas, paths = found["components"]["schemas"], found["paths"]
    there = {"job_id": job_id, "path": path, "index": "0", "vector_id": vector_id, "name": MODEL}
    for methods in paths.values():
        _name_what_is_there(methods, there)
        _leave_keys_out(methods)
    vector: Schema = {"anyOf": [_row(), {"const": vector_id}, ENCODED]}
    forms = _forms(vector, vector_id, job_id)
    _widen(schemas["RequestBody"], forms)
    model = {"model": {"const": MODEL}}
    completion = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    alone = {**model, "stream": {"const": False}}
    streamed = {**model, "stream": {"const": True}, "stream_options": STREAM_OPTIONS}
    _either(
        completion["schema"],
        [
            *(_sendable({**form, **alone}, "model", "prompt") for form in forms),
            *(_sendable({**form, **streamed}, "model", "prompt", "stream") for form in forms),
        ],
    )
    tokenize = paths["/v1/tokenize"]["post"]["requestBody"]["content"]["application/json"]
    _widen(tokenize["schema"], [{**model, "prompt": PROMPTS}], "model", "prompt")
    requests = [{**form, "custom_id": CUSTOM_ID} for form in forms]
    schemas["NewJobRequest"]["anyOf"] += [_sendable(form, "prompt") for form in requests]
    job = {**model, "requests": _some(ref("NewJobRequest"), 4), **JOB_FIELDS}
    runs = {**job, "requests": _some({"anyOf": [_sendable(f, "prompt") for f in requests]}, 4)}
    _widen(schemas["NewJob"], [runs, runs, job], "model", "requests")
    rows = {"activations": {"anyOf": [_row(), items(_row(), minItems=1, maxItems=3), ENCODED]}}
    _widen(schemas["NewVector"], [{**rows, **JOB_FIELDS_OF_VECTORS}], "activations")
    return found


def streams_alone(document: Schema) -> Schema:
    """Give a copy of a narrowed document with Completions alone, most of which stream.

    What the API's own document allows stays allowed: else a body that is none of the forms would
    count as one that has to be refused.
    """
    path = "/v1/completions"
    found: Schema = {**document, "paths": {path: copy.deepcopy(document["paths"][path])}}
    schema = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    *forms, whole = schema["anyOf"]
    schema["anyOf"] = [*(form for form in forms if "stream" in form["required"]), whole]
    return found


def _tell_events(document: Schema) -> None:
    """Describe streams as schemathesis reads them.

    To OpenAPI 3.1 a stream is one text; schemathesis holds its schema against each event, an
    object. What is in the events is checked in runs.py.
    """
    for methods in document["paths"].values():
        for operation in methods.values():
            for answer in operation["responses"].values():
                if EVENTS in answer.get("content", {}):
                    answer["content"][EVENTS] = {"schema": EVENT}


def _name_what_is_there(methods: Schema, there: Mapping[str, str]) -> None:
    for method, operation in methods.items():
        for parameter in operation.get("parameters", ()):
            # What is deleted would be missed by all that follows.
            if parameter["in"] == "path" and method != "delete":
                parameter["schema"] = {"const": there[parameter["name"]]}


def _leave_keys_out(methods: Schema) -> None:
    """Draw no Idempotency-Key: most are drawn again and again, and so hide what is asked.

    Under such a key another body is 422, and the same body gets the first answer, also about a
    vector that was deleted since.
    """
    for operation in methods.values():
        if "parameters" in operation:
            operation["parameters"] = [
                each for each in operation["parameters"] if each["name"] != "Idempotency-Key"
            ]


def _widen(schema: Schema, forms: list[dict[str, Schema]], *required: str) -> None:
    """Make a schema of what it was, or one of `forms`."""
    _either(schema, [_sendable(form, *required) for form in forms])


def _either(schema: Schema, forms: list[Schema]) -> None:
    whole = dict(schema)
    schema.clear()
    schema["anyOf"] = [*forms, whole]


def _sendable(properties: Mapping[str, Schema], *required: str) -> Schema:
    return closed(properties, optional=frozenset(properties) - frozenset(required))


def _row() -> Schema:
    number = {"type": "number", "minimum": -1000, "maximum": 1000}
    return items(number, minItems=HIDDEN_SIZE, maxItems=HIDDEN_SIZE)


def _whole(first: int, *others: int) -> Schema:
    # To JSON Schema 2.0 is an integer, to the API it is none.
    return {"enum": [first, *others]}


def _below(count: int) -> Schema:
    return _whole(*range(count))


def _some(schema: Schema, most: int, **rules: Any) -> Schema:
    return items(schema, minItems=1, maxItems=most, **rules)


ENCODED: Schema = {"const": encode(np.ones(HIDDEN_SIZE, np.float32))}
JOB_FIELDS_OF_VECTORS = {name: JOB_FIELDS[name] for name in ("name", "metadata")}
STREAM_OPTIONS: Schema = {"enum": [None, {}, {"include_usage": False}, {"include_usage": True}]}
TOKEN = _below(VOCAB_SIZE)
POSITION = _below(len(FINISHED_PROMPT))
POSITIONS = _some(POSITION, 3, uniqueItems=True)
TEXT: Schema = {"type": "string", "pattern": rf"^[^\x00]{{3,{PROMPT_MAX}}}$"}
PROMPT: Schema = {"anyOf": [TEXT, items(TOKEN, minItems=3, maxItems=PROMPT_MAX)]}
PROMPTS: Schema = {"anyOf": [PROMPT, _some(PROMPT, 3)]}
LAYERS: Schema = {"anyOf": [_some(_below(N_LAYERS), N_LAYERS, uniqueItems=True), {"const": True}]}
SPANS: Schema = {"enum": [[[0, 1]], [[0, 2]], [[0, 1], [2, 3]]]}
SCALE: Schema = {"type": "number", "minimum": -100, "maximum": 100}
STEPS: Schema = {"enum": [[0, 1], [0, 3], [1, 4]]}
EXCLUDE: Schema = {"anyOf": [{"const": "special_tokens"}, POSITIONS]}
AT: Schema = {
    "anyOf": [
        _sendable({"positions": POSITIONS, "exclude": EXCLUDE}, "positions"),
        _sendable({"phase": {"enum": ["prompt", "generated", "all", "last"]}}, "phase"),
        _sendable({"steps": STEPS, "exclude": EXCLUDE}, "steps"),
        _sendable({"spans": SPANS}, "spans"),
    ]
}
SAMPLING: dict[str, Schema] = {
    "add_special_tokens": {"type": "boolean"},
    "max_tokens": _whole(1, 2, TOKENS_MAX),
    "temperature": {"type": "number", "minimum": 0, "maximum": 100},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _whole(-1, 0, 1, 5, 2**31 - 1),
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": _whole(0, 1, 2**62),
    "stop": {"anyOf": [TEXT, items(TEXT, maxItems=4)]},
    "stop_token_ids": items(TOKEN, maxItems=4),
    "logprobs": nullable(_below(5)),
    "prompt_logprobs": nullable(_below(5)),
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"enum": [str(token) for token in range(0, VOCAB_SIZE, 16)]},
        "additionalProperties": {"type": "number", "minimum": -99, "maximum": 100},
    },
    "ignore_eos": {"type": "boolean"},
    "allowed_token_ids": _some(TOKEN, 4),
    "bad_words": items(TEXT, maxItems=4),
    "return_token_ids": {"type": "boolean"},
    "user": TEXT,
}


def _forms(vector: Schema, vector_id: str, job_id: str) -> list[dict[str, Schema]]:
    """Give bodies that mostly run: several choices or prompts, or reads and writes of one."""
    sites: Schema = {"enum": ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"]}
    place = {"layers": LAYERS, "site": sites, "at": AT}
    steering = [
        _sendable({**target, **given, "scale": SCALE}, "layer_indices", *given)
        for target in (
            {"layer_indices": {"enum": [[0], [N_LAYERS - 1]]}, "norm_match": {"type": "boolean"}},
        )
        for given in (
            {"activations": _some(_row(), 1)},
            {"vector": {"const": vector_id}},
            {"activations": _some(_some(_row(), 3), 1), "position_spans": SPANS},
        )
    ]
    rows = _sendable(
        {
            "job": {"const": job_id},
            "request_index": {"const": 0},
            "layer": {"const": 1},
            "positions": POSITIONS,
        },
        *("job", "request_index", "layer", "positions"),
    )
    ops = [
        _sendable({"op": {"const": op}, **place, **given}, "op", "layers", *given)
        for op, given in (
            ("add", {"vector": vector, "scale": SCALE}),
            ("orthogonal", {"vectors": _some(vector, 2), "coeff": SCALE}),
            ("cap", {"vector": vector, "min": _below(3), "max": {"enum": [3, 5.5]}}),
            ("replace", {"vector": vector}),
        )
    ]
    moved = _sendable(
        {"op": {"const": "replace"}, "layers": LAYERS, "from": rows}, "op", "layers", "from"
    )
    project = _sendable(
        {"project": {"anyOf": [vector, _some(vector, 3)]}, "unit": {"type": "boolean"}}, "project"
    )
    capture = _sendable(
        {
            "name": {"type": "string", "pattern": "^[a-z0-9_]{1,64}$"},
            **place,
            "when": {"enum": ["after", "before"]},
            "reduce": {"anyOf": [{"enum": ["none", "mean", "norm"]}, project]},
        },
        *("name", "layers"),
    )
    one = {"prompt": PROMPT, "max_tokens": SAMPLING["max_tokens"]}
    return [
        {"prompt": PROMPT, **SAMPLING, "n": _whole(1, 2, 3)},
        {**one, "apply_steering_vectors": _some({"anyOf": steering}, 2)},
        {**one, "interventions": _some({"anyOf": [*ops, moved]}, 3), "captures": _some(capture, 2)},
        {**one, "output_residual_stream": LAYERS, "captures": _some(capture, 1)},
    ]
