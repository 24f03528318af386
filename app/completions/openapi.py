"""What POST /v1/tokenize and the requests of Jobs look like, for the OpenAPI document.

Schemas tell fields, types and fixed ranges; what depends on a model, a limit or another field is
told by the answer 400 alone.
"""

from typing import Any, Final

from app.completions.captures import FIELDS as CAPTURE_FIELDS
from app.completions.sampling import (
    BAD_WORDS_MAX,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    SEED_MAX,
)
from app.kit.openapi import (
    COUNT,
    FLAG,
    NUMBER,
    STRING,
    WHOLE,
    Schema,
    answer,
    closed,
    documented,
    items,
    json_body,
    nullable,
    ref,
    sendable,
)
from app.steering.spec import Site

ROW: Final[Schema] = items(NUMBER)
ROWS: Final[Schema] = items(ROW)
IDS: Final[Schema] = items(COUNT)
PAIR: Final[Schema] = items(WHOLE, minItems=2, maxItems=2)
SITE: Final[Schema] = {"enum": [site.value for site in Site]}
LAYERS: Final[Schema] = {
    "description": "Layer numbers from 0, or true for all.",
    "anyOf": [items(COUNT, minItems=1, uniqueItems=True), {"const": True}],
}
STORED: Final[Schema] = {"type": "string", "description": "A stored vector, sv_…"}
VECTOR: Final[Schema] = {"anyOf": [STORED, ROW, ROWS, items(ROWS), ref("EncodedVector")]}
PROMPT: Final[Schema] = {
    "description": "Text, token ids, or a list of several texts or lists of token ids.",
    "anyOf": [STRING, IDS, items({"anyOf": [STRING, IDS]}, minItems=1)],
}
POSITIONS: Final[Schema] = items(COUNT, minItems=1, uniqueItems=True)

_ENCODED: Final[Schema] = {
    "type": "object",
    "description": "One zstd frame in base64; bfloat16 travels as the bits of int16.",
    "properties": {
        "data": {"type": "string", "contentEncoding": "base64"},
        "dtype": {"enum": ["float32", "int16"]},
        "original_dtype": {"enum": ["torch.float32", "torch.bfloat16"]},
        "shape": items({"type": "integer", "minimum": 1}, minItems=1, maxItems=3),
        "compression": {"const": "zstd"},
    },
    "required": ["data", "dtype", "shape", "compression"],
    "additionalProperties": False,
}

_AT: Final[Schema] = sendable(
    {
        "positions": POSITIONS,
        "spans": items(PAIR, minItems=1),
        "phase": {"enum": ["prompt", "generated", "all", "last"]},
        "steps": PAIR,
        "exclude": {"anyOf": [{"const": "special_tokens"}, POSITIONS]},
    }
)

_STEERING_VECTOR: Final[Schema] = sendable(
    {
        "activations": {"anyOf": [ROWS, items(ROWS), ref("EncodedVector")]},
        "vector": STORED,
        "layer_indices": items(COUNT, minItems=1),
        "scale": NUMBER,
        "norm_match": FLAG,
        "position_indices": items(COUNT),
        "position_spans": items(PAIR),
    },
    required=("layer_indices",),
)

_INTERVENTION: Final[Schema] = sendable(
    {
        "op": {"enum": ["add", "orthogonal", "cap", "replace"]},
        "layers": LAYERS,
        "site": SITE,
        "at": ref("At"),
        "heads": items(COUNT, minItems=1, uniqueItems=True),
        "vector": VECTOR,
        "vectors": items(VECTOR),
        "from": ref("CapturedRows"),
        "scale": NUMBER,
        "norm_match": FLAG,
        "coeff": NUMBER,
        "min": NUMBER,
        "max": NUMBER,
    },
    required=("op", "layers"),
)

_CAPTURED_ROWS: Final[Schema] = sendable(
    {
        "job": {"type": "string", "pattern": "^job_[0-9a-f]{32}$"},
        "request_index": COUNT,
        "custom_id": STRING,
        "layer": COUNT,
        "site": SITE,
        "positions": POSITIONS,
    },
    required=("job", "layer"),
)

_CAPTURE: Final[Schema] = sendable(
    {
        "name": {"type": "string", "pattern": "^[a-z0-9_]{1,64}$"},
        "layers": LAYERS,
        "site": SITE,
        "at": ref("At"),
        "when": {"enum": ["after", "before"]},
        "reduce": {
            "anyOf": [
                {"enum": ["none", "mean", "norm"]},
                sendable(
                    {
                        "project": {"anyOf": [VECTOR, items(VECTOR, minItems=1)]},
                        "unit": FLAG,
                    },
                    required=("project",),
                ),
            ]
        },
    },
    required=("name", "layers"),
)
assert _CAPTURE["properties"].keys() == CAPTURE_FIELDS


def _range(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most}


# The fields of a completions body; none is required here, as a Job's defaults may bring it.
COMPLETION_FIELDS: Final[dict[str, Schema]] = {
    "model": STRING,
    "prompt": PROMPT,
    "add_special_tokens": FLAG,
    "max_tokens": {"type": "integer", "minimum": 1},
    "min_tokens": COUNT,
    "temperature": _range(0, 100),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": _range(0, 1),
    "n": {"type": "integer", "minimum": 1},
    "seed": {"type": "integer", "minimum": 0, "maximum": SEED_MAX},
    "stop": {"anyOf": [STRING, items(STRING)]},
    "stop_token_ids": IDS,
    "logprobs": COUNT,
    "prompt_logprobs": COUNT,
    "echo": FLAG,
    "presence_penalty": _range(-2, 2),
    "frequency_penalty": _range(-2, 2),
    "repetition_penalty": _range(REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX),
    "logit_bias": {"type": "object", "additionalProperties": _range(-100, 100)},
    "ignore_eos": FLAG,
    "allowed_token_ids": items(COUNT, minItems=1),
    "bad_words": items(STRING, maxItems=BAD_WORDS_MAX),
    "return_token_ids": FLAG,
    "stream": FLAG,
    "stream_options": {
        "description": "Allowed only with stream: true.",
        **sendable({"include_usage": FLAG}),
    },
    "user": STRING,
    "output_residual_stream": {
        "description": "Layers to read, true for all.",
        "anyOf": [LAYERS, {"const": False}],
    },
    "captures": items(ref("Capture"), minItems=1),
    "apply_steering_vectors": items(ref("SteeringVector"), minItems=1),
    "interventions": items(ref("Intervention"), minItems=1),
}

_TOKENS: Final[Schema] = closed(
    {
        "object": {"const": "tokens"},
        "model": STRING,
        "count": COUNT,
        "max_model_len": COUNT,
        "context_left": {
            "type": "integer",
            "description": "max_model_len - count: room for max_tokens; below 0 it does not fit.",
        },
        "token_ids": IDS,
        "tokens": {
            **items(nullable(STRING)),
            "description": "As the vocabulary writes them; null for an id that it leaves out.",
        },
        "texts": {
            **items(STRING),
            "description": "Each token decoded alone; U+FFFD stands for a part of a character.",
        },
        "offsets": {
            **items(nullable(items(COUNT, minItems=2, maxItems=2))),
            "description": "Characters [start, end) of the text; null for an added token, and "
            "for every token of a prompt that was sent as ids.",
        },
        "special_positions": {
            **items(COUNT),
            "description": 'Positions of BOS, EOS and chat markers: what {"exclude": '
            '"special_tokens"} leaves out.',
        },
        "warnings": items({"enum": ["double_bos"]}),
    }
)

_TENSOR: Final[Schema] = {
    **_ENCODED,
    "description": "Rows [layers, positions, width]; named captures say layers and positions too.",
    "properties": {
        **_ENCODED["properties"],
        "shape": items(COUNT),
        "layers": IDS,
        "positions": IDS,
    },
}

_CHOICE: Final[Schema] = closed(
    {
        "index": COUNT,
        "text": STRING,
        "logprobs": nullable(
            closed(
                {
                    "tokens": items(STRING),
                    "token_logprobs": items(nullable(NUMBER)),
                    "top_logprobs": items(nullable({"type": "object"})),
                    "text_offset": IDS,
                }
            )
        ),
        "finish_reason": {"enum": ["stop", "length"]},
        "stop_reason": nullable({"anyOf": [STRING, COUNT]}),
        "prompt_token_ids": IDS,
        "token_ids": IDS,
        "prompt_logprobs": items(nullable({"type": "array"})),
    },
    optional=frozenset({"prompt_token_ids", "token_ids", "prompt_logprobs"}),
)

_HEAD: Final[dict[str, Schema]] = {
    "id": {"type": "string", "pattern": "^cmpl-[0-9a-f]{32}$"},
    "object": {"const": "text_completion"},
    "created": COUNT,
    "model": STRING,
}
_USAGE: Final[Schema] = closed(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT}
)
_TAIL: Final[dict[str, Schema]] = {
    "activations": closed(
        {
            "residual_stream": _TENSOR,
            "captures": {"type": "object", "additionalProperties": _TENSOR},
        },
        optional=frozenset({"residual_stream", "captures"}),
    ),
    "warnings": {
        **items({"enum": ["double_bos", "dose_above_typical_norm"]}),
        "description": "double_bos: the prompt begins with two BOS tokens, so every position is "
        "one further than meant. dose_above_typical_norm: what an add puts on the residual stream "
        "is longer than a row there typically is (typical_norms of GET /v1/models/{id}).",
    },
}

_COMPLETION: Final[Schema] = closed(
    {**_HEAD, "choices": items(_CHOICE, minItems=1), "usage": _USAGE, **_TAIL},
    optional=frozenset({"activations", "warnings"}),
)

_CHUNK_CHOICE: Final[Schema] = {
    **_CHOICE,
    "description": "What a choice gained. The texts, token_ids and logprobs of its chunks joined "
    "are those of the plain answer; its first chunk holds what belongs to the prompt.",
    "properties": {
        **_CHOICE["properties"],
        "finish_reason": nullable(_CHOICE["properties"]["finish_reason"]),
    },
}
_CHUNK: Final[Schema] = {
    **closed(
        {
            **_HEAD,
            "choices": items(_CHUNK_CHOICE, maxItems=1),
            "usage": nullable(_USAGE),
            **_TAIL,
        },
        optional=frozenset({"usage", "activations", "warnings"}),
    ),
    "description": "Usage (with stream_options.include_usage; null in all chunks before) and "
    "activations come in one last chunk without choices, warnings in the first chunk.",
}

SCHEMAS: Final[dict[str, Schema]] = {
    "Completion": _COMPLETION,
    "CompletionChunk": _CHUNK,
    "EncodedVector": _ENCODED,
    "At": _AT,
    "SteeringVector": _STEERING_VECTOR,
    "Intervention": _INTERVENTION,
    "CapturedRows": _CAPTURED_ROWS,
    "Capture": _CAPTURE,
    "Tokens": _TOKENS,
}

EVENTS: Final[Schema] = {
    "type": "string",
    "description": "With stream: true. Events `data: {CompletionChunk}` as tokens are made, and "
    "`data: [DONE]` last. A stream that fails ends with `data: {Error}` and no [DONE].",
    "contentMediaType": "application/json",
    "contentSchema": ref("CompletionChunk"),
}

CREATE_COMPLETION: Final[dict[str, Any]] = documented(
    {
        200: {
            "description": "The choices, and what was read.",
            "content": {
                "application/json": {"schema": ref("Completion")},
                "text/event-stream": {"schema": EVENTS},
            },
        }
    },
    body=json_body(sendable(COMPLETION_FIELDS, required=("model", "prompt"))),
)

TOKENIZE: Final[dict[str, Any]] = documented(
    {
        200: answer(
            "The tokens of the prompt; a list when a list of prompts was sent.",
            {
                "anyOf": [
                    ref("Tokens"),
                    closed({"object": {"const": "list"}, "data": items(ref("Tokens"))}),
                ]
            },
        )
    },
    body=json_body(
        sendable(
            {"model": STRING, "prompt": PROMPT, "add_special_tokens": FLAG},
            required=("model", "prompt"),
        )
    ),
)
