"""What each op does to one row, and what each reduction makes of one: float64, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np

Vector = np.ndarray


def steer(rows: np.ndarray, edits: list[dict[str, Any]]) -> np.ndarray:
    """Return what the edits of one layer and site make of its rows [positions, width].

    An edit has "op" (add, orthogonal, cap, replace), "steers" (a list of (position, vector)) and
    the op's own fields: "scale" and "norm_match", "coeff", "low" and "high". "heads" (with
    "head_dim") limits it to slices. Edits that are "summed" go first and take the norm of the rows
    as they came.
    """
    after = rows.astype(np.float64)
    came = after.copy()
    for edit in edits:
        if edit.get("summed"):
            _apply(edit, after, came)
    for edit in edits:
        if not edit.get("summed"):
            _apply(edit, after, after)
    return after


def _apply(edit: dict[str, Any], rows: np.ndarray, normed: np.ndarray) -> None:
    width = rows.shape[1]
    slices = [slice(0, width)]
    if edit.get("heads") is not None:
        size = edit["head_dim"]
        slices = [slice(head * size, (head + 1) * size) for head in edit["heads"]]
    for position, vector in edit["steers"]:
        if position >= len(rows):
            continue
        for part in slices:
            v = np.asarray(vector, dtype=np.float64)[part]
            rows[position, part] = _one(edit, rows[position, part], v, normed[position, part])


def _one(edit: dict[str, Any], x: Vector, v: Vector, normed: Vector) -> Vector:
    op, length = edit["op"], float(np.sqrt(v @ v))
    if op == "replace":
        return v
    if length == 0:
        return x
    u = v / length
    if op == "add" and edit.get("norm_match"):
        return x + edit["scale"] * np.sqrt(normed @ normed) * u
    if op == "add":
        return x + edit["scale"] * v
    along = float(x @ u)
    if op == "orthogonal":
        return x - along * u + edit["coeff"] * along * u
    assert op == "cap", op
    low = -np.inf if edit["low"] is None else edit["low"]
    high = np.inf if edit["high"] is None else edit["high"]
    return x - along * u + min(max(along, low), high) * u


def reduced(rows: np.ndarray, read: dict[str, Any]) -> np.ndarray:
    """Return what a capture keeps of the rows [n, width] that it reads: [n or 1, numbers]."""
    rows = rows.astype(np.float64)
    how = read.get("reduce", "none")
    if how == "none":
        return rows
    if how == "mean":
        return rows.mean(axis=0, keepdims=True) if len(rows) else rows
    if how == "norm":
        return np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    assert how == "project", how
    directions = np.asarray(read["directions"], dtype=np.float64)
    if read["unit"]:
        lengths = np.sqrt((directions * directions).sum(axis=1, keepdims=True))
        directions = directions / lengths
    return rows @ directions.T
