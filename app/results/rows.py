"""Rows of results files as plain dictionaries, and what a row says beside the outcome.

Whoever ran the request fills in text and tokens; a request that never ran gets its row from
here alone. Numbers of Steering vectors never enter a row: `steering` names them by content.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from app.completions.spec import RequestSpec
from app.results.schema import RESULTS
from app.steering.spec import Site, to_json

Row = dict[str, Any]


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


def steering_json(spec: RequestSpec) -> str | None:
    """Write a request's interventions as JSON, without the numbers; None when it has none."""
    if not spec.interventions:
        return None
    return json.dumps([to_json(item) for item in spec.interventions], separators=(",", ":"))


def steered_positions(
    spec: RequestSpec, layer: int, site: Site, rows: int
) -> npt.NDArray[np.bool_]:
    """Mark which of the positions 0..rows-1 an intervention of this layer and site acts on.

    One of scale 0 changes nothing and does not count.
    """
    mask = np.zeros(rows, dtype=np.bool_)
    for item in spec.interventions:
        if item.layer != layer or item.site != site or item.scale == 0:
            continue
        if item.positions is not None:
            inside = [position for position in item.positions if position < rows]
            mask[inside] = True
        elif item.spans is not None:
            for start, end in item.spans:
                mask[start:end] = True
        else:
            mask[:] = True
    return mask
