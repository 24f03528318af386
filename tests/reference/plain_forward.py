"""Steering vectors alone, at the stream after a layer: the short form of `hooked.forward`.

For tests in which one model and a few vectors are enough. Takes token ids and plain dictionaries,
runs one request at a time without a cache, and gives the stream after each layer and the logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.reference import hooked

load = hooked.load


def forward(
    model: Any, token_ids: list[int], edits: list[dict[str, Any]]
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Run one sequence with edits; return the stream [tokens, width] by layer and logits.

    An edit is {"layer", "rows" [n, width], "scale", "norm_match", "positions" | "spans" | none}:
    with positions, position k takes row k; otherwise row 0 goes to the spans, or everywhere.
    Those of one layer add up.
    """
    length = len(token_ids)
    passed = hooked.forward(model, token_ids, [_spelled_out(edit, length) for edit in edits])
    streams = {layer: rows for (site, layer), rows in passed.after.items() if site == "resid_post"}
    return streams, passed.logits


def _spelled_out(edit: dict[str, Any], length: int) -> dict[str, Any]:
    rows = np.atleast_2d(np.asarray(edit["rows"], dtype=np.float64))
    return {
        "op": "add",
        "site": "resid_post",
        "layer": edit["layer"],
        "scale": edit["scale"],
        "norm_match": edit.get("norm_match", False),
        "summed": True,
        "steers": [(position, rows[row]) for position, row in _places(edit, length)],
    }


def _places(edit: dict[str, Any], length: int) -> list[tuple[int, int]]:
    if edit.get("positions") is not None:
        return [(at, row) for row, at in enumerate(edit["positions"]) if at < length]
    if edit.get("spans") is not None:
        return [(at, 0) for begin, end in edit["spans"] for at in range(begin, min(end, length))]
    return [(at, 0) for at in range(length)]
