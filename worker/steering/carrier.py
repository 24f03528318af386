"""What a request carries into the engine process: references only, as plain JSON values.

Vectors travel as ids of files, captured rows as paths of mapped files. Position lists are written
once and shared between ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.steering.spec import (
    Capture,
    Intervention,
    Op,
    Site,
    capture_from_json,
    intervention_from_json,
    to_json,
)

CARRIER_KEY = "tiller"
# Lists of these names are written once for all ops that share them.
_SHARED = ("positions", "spans")


@dataclass(frozen=True, slots=True)
class Read:
    """A capture and the mapped file, of `rows` rows a layer, that its rows go to."""

    capture: Capture
    region: str
    rows: int


@dataclass(frozen=True, slots=True)
class Carrier:
    """One request's share of the engine's work.

    `prompt` is P as it was sent: after preemption the engine counts generated tokens as prompt.
    """

    ticket: int
    prompt: int
    ops: tuple[Intervention, ...] = ()
    reads: tuple[Read, ...] = ()
    extras: dict[str, Any] = field(default_factory=dict)


def pack(carrier: Carrier) -> dict[str, Any]:
    """Write a carrier as values that MessagePack can carry."""
    places: dict[object, int] = {}
    table: list[Any] = []

    def shared(data: dict[str, Any]) -> dict[str, Any]:
        for name in _SHARED:
            value = data.get(name)
            if value is not None:
                if value not in places:
                    places[value] = len(table)
                    table.append(value)
                data[name] = places[value]
        return data

    return {
        "ticket": carrier.ticket,
        "prompt": carrier.prompt,
        "ops": [shared(_plain(item)) for item in carrier.ops],
        "reads": [(_plain(read.capture), read.region, read.rows) for read in carrier.reads],
        "places": table,
        **carrier.extras,
    }


def unpack(data: dict[str, Any]) -> Carrier:
    """Read a carrier as `pack` wrote it; raise KeyError, TypeError or ValueError when it is bad."""
    table = data["places"]

    def op(item: dict[str, Any]) -> Intervention:
        lists = {name: table[item[name]] for name in _SHARED if item.get(name) is not None}
        return intervention_from_json({**item, **lists})

    return Carrier(
        ticket=data["ticket"],
        prompt=data["prompt"],
        ops=tuple(op(item) for item in data["ops"]),
        reads=tuple(
            Read(capture_from_json(capture), region, rows)
            for capture, region, rows in data["reads"]
        ),
    )


def _plain(item: Intervention | Capture) -> dict[str, Any]:
    """Write an item with plain strings: the engine's decoder knows none of our enumerations."""
    data = to_json(item)
    return {
        key: value.value if isinstance(value, Op | Site) or key == "reduce" else value
        for key, value in data.items()
    }
