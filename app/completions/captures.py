"""Checks `output_residual_stream` and `captures`: which layers are read, and how many bytes."""

import re
from collections.abc import Mapping
from typing import Any

from app.catalog import ServedModel
from app.completions.problems import Problem, RefusedError, is_int, shown, unknown_field
from app.steering.spec import Capture, Site
from app.steering.vectors import ITEM_BYTES

RESIDUAL_STREAM = "residual_stream"  # the capture that output_residual_stream asks for
CAPTURES_MAX = 16
FIELDS = frozenset({"name", "layers", "site", "at", "when", "reduce"})
_NAME = re.compile(r"[a-z0-9_]{1,64}")


def read_captures(
    body: Mapping[str, Any], model: ServedModel, problems: list[Problem]
) -> tuple[Capture, ...]:
    """Give the captures that a body asks for; add what is wrong with them."""
    captures: list[Capture] = []
    asked = body.get("output_residual_stream")
    if asked is not None and asked is not False:
        try:
            layers = _layers(asked, model)
            captures.append(Capture(RESIDUAL_STREAM, Site.resid_post, layers))
        except RefusedError as refusal:
            message = f"output_residual_stream {refusal}"
            problems.append(Problem("output_residual_stream", message))
    named = body.get("captures")
    if named is not None:
        try:
            captures.extend(_named(named, model))
        except RefusedError as refusal:
            problems.append(Problem("captures", f"captures{refusal}"))
    return tuple(captures)


def capture_bytes(captures: tuple[Capture, ...], model: ServedModel, *, rows: int) -> int:
    """Count the bytes of `rows` rows of every capture in the model's dtype."""
    layers = sum(len(capture.layers) for capture in captures)
    return layers * rows * model.hidden_size * ITEM_BYTES[model.dtype]


def _layers(asked: Any, model: ServedModel) -> tuple[int, ...]:
    if asked is True:
        return tuple(range(model.n_layers))
    if not isinstance(asked, list) or not all(map(is_int, asked)):
        msg = f"must be a list of layer numbers, or true for all layers, not {shown(asked)}."
        raise RefusedError(msg)
    if not asked:
        msg = "names no layer. Name at least one, send true for all, or leave the field out."
        raise RefusedError(msg)
    missing = next((layer for layer in asked if not 0 <= layer < model.n_layers), None)
    if missing is not None:
        msg = (
            f"names layer {missing}, but {model.name} has {model.n_layers} layers "
            f"(0 to {model.n_layers - 1})."
        )
        raise RefusedError(msg)
    layers = sorted(set(asked))
    if len(layers) < len(asked):
        twice = next(layer for layer in asked if asked.count(layer) > 1)
        msg = f"names layer {twice} more than once."
        raise RefusedError(msg)
    return tuple(layers)


def _named(named: Any, model: ServedModel) -> list[Capture]:
    if not isinstance(named, list) or not all(isinstance(item, dict) for item in named):
        msg = f" must be a list of objects, not {shown(named)}."
        raise RefusedError(msg)
    if not 0 < len(named) <= CAPTURES_MAX:
        msg = f" holds {len(named)} captures; 1 to {CAPTURES_MAX} are allowed."
        raise RefusedError(msg)
    captures: list[Capture] = []
    for index, item in enumerate(named):
        try:
            captures.append(_one(item, model))
        except RefusedError as refusal:
            msg = f"[{index}] {refusal}"
            raise RefusedError(msg) from None
    names = [capture.name for capture in captures]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        msg = f" holds the name {twice!r} more than once; each capture needs its own."
        raise RefusedError(msg)
    return captures


def _one(item: dict[str, Any], model: ServedModel) -> Capture:
    name = item.get("name")
    for key in item:
        if key not in FIELDS:
            raise RefusedError("is wrong: " + unknown_field(key, FIELDS, of="a capture"))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == RESIDUAL_STREAM:
        msg = (
            f"has the name {shown(name)}; use 1 to 64 of a-z, 0-9 and _, and not "
            f"{RESIDUAL_STREAM!r}, which output_residual_stream uses."
        )
        raise RefusedError(msg)
    site = item.get("site", "resid_post")
    if not isinstance(site, str) or site not in model.sites:
        msg = f"has the site {shown(site)}; {model.name} offers {', '.join(model.sites)}."
        raise RefusedError(msg)
    offered = (("when", "after"), ("reduce", "none"), ("at", {"phase": "all"}))
    for key, value in offered:
        if item.get(key) is not None and item[key] != value:
            msg = f"has {key} {shown(item[key])}; this server offers {shown(value)} only."
            raise RefusedError(msg)
    try:
        return Capture(name, Site(site), _layers(item.get("layers"), model))
    except RefusedError as refusal:
        msg = f"has layers that cannot be read: it {refusal}"
        raise RefusedError(msg) from None
