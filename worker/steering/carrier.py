"""What a request carries into the engine process: references only, as plain JSON values.

Vectors travel as ids of files, captured rows as paths of mapped files. What several ops share is
written once. A request may bring an op for every layer, so an op is a row of values here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.steering.spec import (
    Capture,
    Intervention,
    Op,
    Reduce,
    Site,
    capture_from_json,
    to_json,
)

CARRIER_KEY = "tiller"
_OPS = {op.value: op for op in Op}
_SITES = {site.value: site for site in Site}


@dataclass(frozen=True, slots=True)
class Read:
    """A capture and the mapped file, of `rows` rows a layer, that its rows go to."""

    capture: Capture
    region: str
    rows: int


@dataclass(frozen=True, slots=True)
class Carrier:
    """One request's share of the engine's work."""

    ticket: int
    ops: tuple[Intervention, ...] = ()
    reads: tuple[Read, ...] = ()

    def places(self) -> Iterator[tuple[Site, int]]:
        """List the site and layer of every op and read."""
        for item in self.ops:
            yield item.site, item.layer
        for read in self.reads:
            for layer in read.capture.layers:
                yield read.capture.site, layer


def pack(carrier: Carrier) -> dict[str, Any]:
    """Write a carrier as values that MessagePack can carry."""
    table = _Table()
    return {
        "ticket": carrier.ticket,
        "ops": [_pack_op(item, table) for item in carrier.ops],
        "reads": [(_plain(read.capture), read.region, read.rows) for read in carrier.reads],
        "shared": table.values,
    }


def unpack(data: dict[str, Any]) -> Carrier:
    """Read a carrier as `pack` wrote it; raise KeyError, TypeError or ValueError when it is bad."""
    shared = [_frozen(value) for value in data["shared"]]
    return Carrier(
        ticket=data["ticket"],
        ops=tuple(_unpack_op(item, shared) for item in data["ops"]),
        reads=tuple(
            Read(capture_from_json(capture), region, rows)
            for capture, region, rows in data["reads"]
        ),
    )


class _Table:
    """Values that several ops share, each written once; -1 stands for None."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[object, int] = {}

    def place(self, value: Any) -> int:
        if value is None:
            return -1
        place = self._places.get(value)
        if place is None:
            place = self._places[value] = len(self.values)
            self.values.append(value)
        return place


def _pack_op(item: Intervention, table: _Table) -> tuple[Any, ...]:
    # Plain strings: the engine's decoder knows none of our enumerations.
    return (
        *(item.op.value, item.site.value, item.layer, table.place(item.vector), item.row),
        *(float(item.scale), item.norm_match, table.place(item.positions)),
        *(table.place(item.spans), item.coeff, item.low, item.high),
        *(table.place(item.heads), item.summed),
    )


def _unpack_op(item: Sequence[Any], shared: list[Any]) -> Intervention:
    op, site, layer, vector, row, scale, norm_match, positions, spans = item[:9]
    coeff, low, high, heads, summed = item[9:]
    return Intervention(
        op=_OPS[op],
        site=_SITES[site],
        layer=layer,
        vector=shared[vector],
        row=row,
        scale=scale,
        norm_match=norm_match,
        positions=None if positions < 0 else shared[positions],
        spans=None if spans < 0 else shared[spans],
        coeff=coeff,
        low=low,
        high=high,
        heads=None if heads < 0 else shared[heads],
        summed=summed,
    )


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _plain(item: Capture) -> dict[str, Any]:
    """Write a capture with plain strings, for the same reason."""
    data = to_json(item)
    return {
        key: value.value if isinstance(value, Site | Reduce) else value
        for key, value in data.items()
    }
