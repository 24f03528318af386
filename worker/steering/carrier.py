"""What a request carries into the engine process: references only, as plain JSON values.

Vectors travel as ids of files, captured rows as the path of a mapped file. Position lists are
written once and shared between ops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from app.steering.spec import Intervention, Op, Site

CARRIER_KEY = "tiller"
# Interventions that this engine knows; anything else is refused before it can be left out.
SERVED_OPS = frozenset({Op.add})
SERVED_SITES = frozenset({Site.resid_post})


@dataclass(frozen=True, slots=True)
class AddOp:
    """x + scale * row of a vector at one layer; positions and spans as in `Intervention`."""

    layer: int
    vector: str
    row: int
    scale: float
    norm_match: bool
    positions: tuple[int, ...] | None
    spans: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, slots=True)
class Carrier:
    """One request's share of the engine's work.

    `prompt` is P as it was sent: after preemption the engine counts generated tokens as prompt.
    `region` holds `region_rows` rows for each of `capture_layers`.
    """

    ticket: int
    prompt: int
    ops: tuple[AddOp, ...] = ()
    capture_layers: tuple[int, ...] = ()
    region: str | None = None
    region_rows: int = 0
    extras: dict[str, Any] = field(default_factory=dict)


def add_op(item: Intervention) -> AddOp | None:
    """Turn an intervention into its op; None when it changes nothing.

    Raises ValueError for an op or a site that this engine does not serve.
    """
    if item.op not in SERVED_OPS or item.site not in SERVED_SITES:
        msg = f"the engine does not serve {item.op.value} at {item.site.value}"
        raise ValueError(msg)
    if item.scale == 0:
        return None
    return AddOp(
        layer=item.layer,
        vector=item.vector,
        row=item.row,
        scale=item.scale,
        norm_match=item.norm_match,
        positions=item.positions,
        spans=item.spans,
    )


def pack(carrier: Carrier) -> dict[str, Any]:
    """Write a carrier as values that MessagePack can carry."""
    places: dict[object, int] = {}
    table: list[Any] = []

    def place(value: tuple[Any, ...] | None) -> int:
        if value is None:
            return -1
        if value not in places:
            places[value] = len(table)
            table.append(value)
        return places[value]

    ops = [
        (
            op.layer,
            op.vector,
            op.row,
            float(op.scale),
            op.norm_match,
            place(op.positions),
            place(op.spans),
        )
        for op in carrier.ops
    ]
    return {
        "ticket": carrier.ticket,
        "prompt": carrier.prompt,
        "ops": ops,
        "places": table,
        "capture_layers": carrier.capture_layers,
        "region": carrier.region,
        "region_rows": carrier.region_rows,
        **carrier.extras,
    }


def unpack(data: dict[str, Any]) -> Carrier:
    """Read a carrier as `pack` wrote it; raise KeyError, TypeError or ValueError when it is bad."""
    table = data["places"]

    def spans(index: int) -> tuple[tuple[int, int], ...] | None:
        return None if index < 0 else tuple((a, b) for a, b in table[index])

    def positions(index: int) -> tuple[int, ...] | None:
        return None if index < 0 else tuple(table[index])

    def ops(items: Iterable[Any]) -> Iterable[AddOp]:
        for layer, vector, row, scale, norm_match, at, ranges in items:
            yield AddOp(layer, vector, row, scale, norm_match, positions(at), spans(ranges))

    return Carrier(
        ticket=data["ticket"],
        prompt=data["prompt"],
        ops=tuple(ops(data["ops"])),
        capture_layers=tuple(data["capture_layers"]),
        region=data["region"],
        region_rows=data["region_rows"],
    )
