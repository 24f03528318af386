"""The columns of result files and how they are written; nothing here touches a file.

    results/part-…                      one row per request and choice
    activations/layer=L/part-…          one row per request and position: output_residual_stream
    captures/<name>/layer=L/part-…      the same for a named capture, or one row per request (mean)
    moments/part-…                      running statistics of a part, one row per capture and layer
    stats.parquet                       the moments of all parts, merged when the Job ends

Rows are ordered by request_index, then choice or position. Sums over held_tokens and
charged_tokens are right: the prompt is counted on choice 0 only. Settings are from measurements
(bench/RESULTS.md): float32 with BYTE_STREAM_SPLIT and zstd level 1 keeps bfloat16 bit for bit at
0.70 of its raw size and is read natively by every Parquet reader.
"""

from typing import Any, Final

import pyarrow as pa

from app.steering.spec import Reduce

SCHEMA_VERSION: Final = "1"
RESIDUAL_STREAM: Final = "residual_stream"  # the capture that output_residual_stream asks for
ROW_GROUP_BYTES: Final = 8 * 1024**2  # decoded; a reader of one request fetches about a third
ROW_GROUP_ROWS_MIN: Final = 64
ROW_GROUP_ROWS_MAX: Final = 65_536  # narrow rows: what stands beside the value counts too
RESULTS_GROUP_ROWS: Final = 1024
RESULTS_GROUP_BYTES: Final = 8 * 1024**2
PAGE_BYTES: Final = 1024**2  # 256 KB pages cost 8% of size


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


_ALTERNATIVES = pa.list_(
    pa.field(
        "element",
        pa.struct(
            [
                _required("token_id", pa.int32()),
                _required("token", pa.string()),
                _required("logprob", pa.float32()),
            ]
        ),
        nullable=False,
    )
)
_TIME = pa.timestamp("us", tz="UTC")

RESULTS: Final = pa.schema(
    [
        _required("request_index", pa.int64()),
        pa.field("custom_id", pa.string()),
        _required("choice_index", pa.int16()),
        _required("status", pa.string()),
        pa.field("text", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("stop_reason", pa.string()),
        pa.field("prompt", pa.string()),
        _required("prompt_token_ids", _list_of(pa.int32())),
        pa.field("token_ids", _list_of(pa.int32())),
        pa.field("token_logprobs", _list_of(pa.float32())),
        pa.field("top_logprobs", pa.list_(pa.field("element", _ALTERNATIVES, nullable=False))),
        pa.field("prompt_logprobs", pa.list_(pa.field("element", _ALTERNATIVES))),
        _required("prompt_tokens", pa.int32()),
        _required("completion_tokens", pa.int32()),
        _required("held_tokens", pa.int64()),
        _required("charged_tokens", pa.int64()),
        _required("model", pa.string()),
        _required("model_revision", pa.string()),
        _required("dtype", pa.string()),
        pa.field("engine", pa.string()),
        pa.field("engine_mode", pa.string()),
        pa.field("seed", pa.int64()),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("steering", pa.string()),
        pa.field("captures", pa.string()),
        pa.field("warnings", _list_of(pa.string())),
        pa.field("activation_layers", _list_of(pa.int16())),
        pa.field("activation_rows", pa.int32()),
        pa.field("attempt", pa.int32()),
        pa.field("error_code", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("started_at", _TIME),
        pa.field("finished_at", _TIME),
    ]
)

MOMENTS: Final = pa.schema(
    [
        _required("capture", pa.string()),
        _required("layer", pa.int32()),
        _required("count", pa.int64()),
        _required("mean", _list_of(pa.float64())),
        _required("m2", _list_of(pa.float64())),
        _required("norm_sum", pa.float64()),
    ]
)

STATS: Final = pa.schema(
    [
        _required("capture", pa.string()),
        _required("layer", pa.int32()),
        _required("count", pa.int64()),
        _required("mean", _list_of(pa.float64())),
        _required("std", _list_of(pa.float64())),
        _required("mean_norm", pa.float64()),
    ]
)

_DICTIONARY_RESULTS = [
    "status",
    "finish_reason",
    "stop_reason",
    "prompt",
    "model",
    "model_revision",
    "dtype",
    "engine",
    "engine_mode",
    "steering",
    "captures",
    "warnings.list.element",
    "error_code",
    "error_message",
]


def value_column(capture: str, reduce: Reduce = Reduce.none) -> str:
    """Name the column that holds what a capture read; it is the last one."""
    if reduce is Reduce.norm:
        return "norm"
    if reduce is Reduce.project:
        return "projection"
    return "residual" if capture == RESIDUAL_STREAM else "activation"


def activations_schema(capture: str, width: int, reduce: Reduce = Reduce.none) -> pa.Schema:
    """Give the columns of a capture's files; `width` is how many numbers a row's value has.

    A mean has no position of its own: it counts the `positions` that it was taken over. A norm
    is a plain number, everything else a list of fixed size.
    """
    number = pa.float32()
    vector = pa.list_(pa.field("element", number, nullable=False), width)
    if reduce is Reduce.mean:
        places = [_required("positions", pa.int32())]
    else:
        places = [
            _required("position", pa.int32()),
            _required("token_id", pa.int32()),
            _required("is_generated", pa.bool_()),
            _required("steered", pa.bool_()),
        ]
    return pa.schema(
        [
            _required("request_index", pa.int64()),
            pa.field("custom_id", pa.string()),
            *places,
            _required(value_column(capture, reduce), number if reduce is Reduce.norm else vector),
        ]
    )


def row_group_rows(width: int) -> int:
    """Say how many rows of `width` float32 numbers one row group holds."""
    rows = ROW_GROUP_BYTES // (4 * width)
    return min(max(ROW_GROUP_ROWS_MIN, rows), ROW_GROUP_ROWS_MAX)


def results_options() -> dict[str, Any]:
    """Give the writer's options for results files."""
    return _options(_DICTIONARY_RESULTS, {}, ["request_index"])


def activations_options(capture: str, reduce: Reduce = Reduce.none) -> dict[str, Any]:
    """Give the writer's options for activations and captures files."""
    value = value_column(capture, reduce)
    places = ["positions"] if reduce is Reduce.mean else ["position", "token_id"]
    encodings = dict.fromkeys(["request_index", *places], "DELTA_BINARY_PACKED")
    encodings[value if reduce is Reduce.norm else f"{value}.list.element"] = "BYTE_STREAM_SPLIT"
    return _options(["custom_id"], encodings, ["request_index", places[0]])


def statistics_options() -> dict[str, Any]:
    """Give the writer's options for moments and stats files."""
    encodings = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in ("mean", "m2", "std")}
    return _options(["capture"], encodings, ["layer"])


def _options(
    dictionary: list[str], encodings: dict[str, str], statistics: list[str]
) -> dict[str, Any]:
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": dictionary,
        "column_encoding": encodings or None,
        "write_statistics": statistics,
        "write_page_checksum": True,
        "data_page_size": PAGE_BYTES,
        "store_schema": True,
    }
