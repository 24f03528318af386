"""Rows of results files as plain dictionaries, and what a row says beside the outcome.

Whoever ran the request fills in text and tokens; a request that never ran gets its row from
here alone. Numbers of Steering vectors never enter a row: `steering` names them by content.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from app.completions.spec import RequestSpec
from app.results.schema import RESULTS
from app.steering.spec import Capture, Intervention, Site, to_json

Row = dict[str, Any]

_TEXT = 0
_OUTCOME = [
    (RESULTS.field(name), bits)
    for name, bits in {
        "text": _TEXT,
        "finish_reason": _TEXT,
        "stop_reason": _TEXT,
        "token_ids": None,
        "token_logprobs": None,
        "top_logprobs": None,
        "prompt_logprobs": None,
        "completion_tokens": 32,
        "charged_tokens": 64,
        "seed": 64,
        "activation_rows": 32,
    }.items()
]


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What every row of a part says about the model and the engine (None: no engine ran)."""

    model: str
    model_revision: str
    dtype: str
    engine: str | None
    engine_mode: str | None


@dataclass(frozen=True, slots=True)
class RowName:
    """Which request a row is about, and what was asked."""

    request_index: int
    custom_id: str | None
    spec: RequestSpec
    attempt: int | None


def asked_columns(name: RowName, facts: RowFacts) -> Row:
    """Give the columns that are known before a request runs, the same for all its choices."""
    spec = name.spec
    return {
        "request_index": name.request_index,
        "custom_id": name.custom_id,
        "prompt": spec.prompt,
        "prompt_token_ids": spec.prompt_token_ids,
        "prompt_tokens": spec.prompt_tokens,
        "model": facts.model,
        "model_revision": facts.model_revision,
        "dtype": facts.dtype,
        "engine": facts.engine,
        "engine_mode": facts.engine_mode,
        "max_tokens": spec.sampling.max_tokens,
        "temperature": spec.sampling.temperature,
        "steering": steering_json(spec),
        "captures": captures_json(spec),
        "warnings": spec.warnings or None,
        "attempt": name.attempt,
    }


def row_without_text(
    name: RowName,
    facts: RowFacts,
    status: str,
    *,
    error: tuple[str | None, str | None] = (None, None),
    finished_at: datetime | None = None,
) -> Row:
    """Give the one row of a request that was errored, cancelled or expired; nothing is charged."""
    return {
        **asked_columns(name, facts),
        "choice_index": 0,
        "status": status,
        "seed": name.spec.sampling.seed,
        "completion_tokens": 0,
        "held_tokens": name.spec.tokens_held,
        "charged_tokens": 0,
        "error_code": error[0],
        "error_message": error[1],
        "finished_at": finished_at,
    }


def rows_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    """Turn rows into Arrow columns; a column that a row leaves out is null."""
    columns = [
        pa.array([row.get(field.name) for row in rows], type=field.type) for field in RESULTS
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RESULTS)


def check_outcome(row: Row) -> None:
    """Try whether a results file can hold what an engine brought into a row.

    Raises pa.ArrowException, ValueError, TypeError or OverflowError if not. Columns that come
    from the request itself are not looked at: intake has refused what does not fit.
    """
    for field, bits in _OUTCOME:
        value = row.get(field.name)
        if value is None:
            if not field.nullable:
                msg = f"{field.name} is missing"
                raise ValueError(msg)
        elif bits is None:
            _refuse_nulls(field, pa.array([value], type=field.type))
        # Texts and whole numbers by hand: Arrow takes 5 microseconds for each.
        elif bits == _TEXT:
            if not isinstance(value, str):
                msg = f"{field.name} is {value!r}, not a text"
                raise TypeError(msg)
            value.encode()
        elif not isinstance(value, int) or not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            msg = f"{field.name} is {value!r}, not a whole number of {bits} bits"
            raise ValueError(msg)


def _refuse_nulls(field: pa.Field, values: pa.Array) -> None:
    """Find nulls where there must be none: Arrow takes them, only the Parquet writer does not."""
    if values.null_count and not field.nullable:
        msg = f"{field.name} is null"
        raise ValueError(msg)
    if pa.types.is_list(field.type):
        _refuse_nulls(field.type.value_field, values.flatten())
    elif pa.types.is_struct(field.type):
        for inner, column in zip(field.type, values.flatten(), strict=True):
            # A struct that is null has null fields, and may.
            _refuse_nulls(inner, column.filter(values.is_valid()))


def steering_json(spec: RequestSpec) -> str | None:
    """Write a request's interventions as JSON, without the numbers; None when it has none."""
    if not spec.interventions:
        return None
    return json.dumps([to_json(item) for item in spec.interventions], separators=(",", ":"))


def captures_json(spec: RequestSpec) -> str | None:
    """Write what a request reads as JSON, directions by name; None when it reads nothing."""
    return _captures_text(spec.captures) if spec.captures else None


@lru_cache(maxsize=256)  # requests of a Job mostly read the same
def _captures_text(captures: tuple[Capture, ...]) -> str:
    return json.dumps([to_json(item) for item in captures], separators=(",", ":"))


def acting_interventions(spec: RequestSpec) -> dict[tuple[Site, int], list[Intervention]]:
    """Sort a request's interventions by site and layer.

    One that changes nothing whatever its vector (scale 0, coeff 1) is left out.
    """
    acting: dict[tuple[Site, int], list[Intervention]] = {}
    for item in spec.interventions:
        if not item.changes_nothing:
            acting.setdefault((item.site, item.layer), []).append(item)
    return acting


def steered_positions(
    interventions: Iterable[Intervention], positions: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Mark at which of `positions` one of these interventions, all of one place, acts.

    An op on some heads acts on the position. A cap acts also where the projection lies within
    its bounds, and a vector may be zero: neither is known here.
    """
    mask = np.zeros(len(positions), dtype=np.bool_)
    for item in interventions:
        if item.positions is not None:
            mask |= np.isin(positions, item.positions)
        elif item.spans is not None:
            for start, end in item.spans:
                mask |= (positions >= start) & (positions < end)
        else:
            mask[:] = True
    return mask
