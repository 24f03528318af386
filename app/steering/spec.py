"""Interventions and captures as frozen data, resolved to single layers and absolute positions.

The API builds these after validation, Postgres keeps them as JSON inside a request's spec, the
worker hands them to the engine. They carry references to vectors, never numbers: `vector` is the
content address ("sv_" + sha256) of a stored tensor, `row` counts its rows when it is seen as
[rows, width].
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Site(StrEnum):
    """Where in a layer an intervention writes or a capture reads (DESIGN section 1)."""

    resid_pre = "resid_pre"
    resid_mid = "resid_mid"
    resid_post = "resid_post"
    attn_out = "attn_out"
    mlp_out = "mlp_out"
    z = "z"


class Op(StrEnum):
    """What an intervention does to the tensor of its site."""

    add = "add"


@dataclass(frozen=True, slots=True)
class Intervention:
    """One op at one layer and site.

    Positions are absolute (0 is the first prompt token). `positions` lists single positions, and
    position k then takes row `row + k`, one vector a position. `spans` lists half-open ranges
    that all take row `row`. Both None: every position takes row `row`.
    With `norm_match` the vector is scaled to the norm that the residual stream had at that
    position before any op of this layer and site ran.
    """

    op: Op
    site: Site
    layer: int
    vector: str
    row: int
    scale: float = 1.0
    norm_match: bool = False
    positions: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class Capture:
    """A read of one site at some layers (ascending), at every position, after all ops there."""

    name: str
    site: Site
    layers: tuple[int, ...]


def intervention_from_json(data: dict[str, Any]) -> Intervention:
    """Read an intervention as `to_json` wrote it."""
    positions, spans = data.get("positions"), data.get("spans")
    return Intervention(
        op=Op(data["op"]),
        site=Site(data["site"]),
        layer=data["layer"],
        vector=data["vector"],
        row=data["row"],
        scale=float(data.get("scale", 1.0)),  # jsonb gives 1e20 back as a whole number
        norm_match=data.get("norm_match", False),
        positions=None if positions is None else tuple(positions),
        spans=None if spans is None else tuple((a, b) for a, b in spans),
    )


def capture_from_json(data: dict[str, Any]) -> Capture:
    """Read a capture as `to_json` wrote it."""
    return Capture(name=data["name"], site=Site(data["site"]), layers=tuple(data["layers"]))


def to_json(item: Intervention | Capture) -> dict[str, Any]:
    """Write an intervention or capture as JSON, leaving out what is None."""
    return {key: value for key, value in asdict(item).items() if value is not None}
