"""Interventions and captures as frozen data, resolved to single layers and absolute positions.

The API builds these after validation, Postgres keeps them as JSON inside a request's spec, the
worker hands them to the engine. They carry references to vectors, never numbers: `vector` is the
content address ("sv_" + sha256) of a stored tensor, `row` counts its rows when it is seen as
[rows, width]. Whatever a user says about phases, steps and exclusions is spans by then.

Readers take what older code wrote, with its fields missing, and refuse what newer code added: a
field that is passed over is steering that silently does not happen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final, TypeAlias

# Half-open ranges of positions, ascending and disjoint. An end of FOREVER is open.
Spans: TypeAlias = tuple[tuple[int, int], ...]
FOREVER: Final = 2**31 - 1


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
    orthogonal = "orthogonal"
    cap = "cap"
    replace = "replace"  # type: ignore[assignment]  # str has a method of this name


class Reduce(StrEnum):
    """What a capture keeps of the rows that it reads."""

    none = "none"  # the rows
    mean = "mean"  # their mean, one row
    norm = "norm"  # the Euclidean norm of each
    project = "project"  # the dot product of each with every direction


@dataclass(frozen=True, slots=True)
class Intervention:
    """One op at one layer and site; x is the tensor there, v the vector's row, u = v / |v|.

        add         x + scale * v, or with norm_match x + scale * |x| * u
        orthogonal  x + (coeff - 1) * (x . u) * u
        cap         x + (clamp(x . u, low, high) - x . u) * u; None leaves a side open
        replace     v

    Positions are absolute (0 is the first prompt token). `positions` lists single positions, and
    position k then takes row `row + k`, one vector a position. `spans` lists half-open ranges
    that all take row `row`. Both None: every position takes row `row`.

    Interventions of one layer and site act in their order. Those that are `summed` (the Steering
    vectors of apply_steering_vectors) come first and add up: the norm of norm_match is then that
    of x before any of them. `heads` (site z only) makes it an op on the slice of each of these
    heads alone, with norms and projections of the slice; `vector` has the site's whole width.
    """

    op: Op
    site: Site
    layer: int
    vector: str
    row: int
    scale: float = 1.0
    norm_match: bool = False
    positions: tuple[int, ...] | None = None
    spans: Spans | None = None
    coeff: float | None = None
    low: float | None = None
    high: float | None = None
    heads: tuple[int, ...] | None = None
    summed: bool = False

    @property
    def changes_nothing(self) -> bool:
        """Whether it is no op at all, whatever its vector: scale 0, coeff 1, no position."""
        if self.spans == () or self.positions == () or self.heads == ():
            return True
        if self.op is Op.add:
            return self.scale == 0
        return self.op is Op.orthogonal and self.coeff == 1


@dataclass(frozen=True, slots=True)
class Direction:
    """Row `row` of a stored vector, for a capture that projects."""

    vector: str
    row: int = 0


@dataclass(frozen=True, slots=True)
class Capture:
    """A read of one site at some layers (ascending).

    `spans` are the positions that are read, None for all; those that never run are left out.
    Read after all ops of the layer and site, or `before` them. `directions` belong to
    Reduce.project, at unit length when `unit`.
    """

    name: str
    site: Site
    layers: tuple[int, ...]
    spans: Spans | None = None
    before: bool = False
    reduce: Reduce = Reduce.none
    directions: tuple[Direction, ...] = ()
    unit: bool = False

    def width(self, site_width: int) -> int:
        """How many numbers one row of the result has, at a site of `site_width` numbers."""
        if self.reduce is Reduce.norm:
            return 1
        return len(self.directions) if self.reduce is Reduce.project else site_width

    def rows(self, positions: int) -> int:
        """How many of the positions 0..positions - 1 are read."""
        if self.spans is None:
            return positions
        return sum(max(0, min(end, positions) - start) for start, end in self.spans)

    def reads(self, position: int) -> bool:
        """Whether a position is read."""
        return self.spans is None or any(start <= position < end for start, end in self.spans)


def vector_names(interventions: Iterable[Intervention], captures: Iterable[Capture]) -> set[str]:
    """Collect the names of all stored vectors that a request needs."""
    names = {item.vector for item in interventions}
    return names | {item.vector for capture in captures for item in capture.directions}


class NewerSpecError(ValueError):
    """What is stored has a field that this code does not know: newer code wrote it."""


def field_names(kind: type[Any]) -> frozenset[str]:
    """Name the fields of a dataclass: what its writer may write, and all that its reader takes."""
    return frozenset(field.name for field in fields(kind))


def refuse_unknown(data: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    """Raise NewerSpecError when `data`, the stored form of `what`, has a key that is not known."""
    if not data.keys() <= known:
        names = ", ".join(sorted(data.keys() - known))
        msg = (
            f"{what} has {names[:200]}, which this version of Tiller does not know: a newer one "
            "stored it, and has to run it"
        )
        raise NewerSpecError(msg)


_INTERVENTION: Final = field_names(Intervention)
_CAPTURE: Final = field_names(Capture)
_DIRECTION: Final = field_names(Direction)


def intervention_from_json(data: dict[str, Any]) -> Intervention:
    """Read an intervention as `to_json` wrote it; raises NewerSpecError."""
    refuse_unknown(data, _INTERVENTION, "an intervention")
    return Intervention(
        op=Op(data["op"]),
        site=Site(data["site"]),
        layer=data["layer"],
        vector=data["vector"],
        row=data["row"],
        scale=float(data.get("scale", 1.0)),  # jsonb gives 1e20 back as a whole number
        norm_match=data.get("norm_match", False),
        positions=_tuple(data.get("positions")),
        spans=_spans(data.get("spans")),
        coeff=_float(data.get("coeff")),
        low=_float(data.get("low")),
        high=_float(data.get("high")),
        heads=_tuple(data.get("heads")),
        summed=data.get("summed", False),
    )


def capture_from_json(data: dict[str, Any]) -> Capture:
    """Read a capture as `to_json` wrote it; raises NewerSpecError."""
    refuse_unknown(data, _CAPTURE, "a capture")
    directions = data.get("directions", ())
    for item in directions:
        refuse_unknown(item, _DIRECTION, "a direction")
    return Capture(
        name=data["name"],
        site=Site(data["site"]),
        layers=tuple(data["layers"]),
        spans=_spans(data.get("spans")),
        before=data.get("before", False),
        reduce=Reduce(data.get("reduce", Reduce.none)),
        directions=tuple(Direction(**item) for item in directions),
        unit=data.get("unit", False),
    )


_DEFAULTS: Final = {
    "before": False,
    "reduce": Reduce.none,
    "directions": (),
    "unit": False,
    "summed": False,
}


def to_json(item: Intervention | Capture) -> dict[str, Any]:
    """Write an intervention or capture as JSON, leaving out what is None or the later default."""
    return {
        key: value
        for key, value in asdict(item).items()
        if value is not None and not (key in _DEFAULTS and value == _DEFAULTS[key])
    }


def _tuple(items: list[int] | None) -> tuple[int, ...] | None:
    return None if items is None else tuple(items)


def _spans(items: list[list[int]] | None) -> Spans | None:
    return None if items is None else tuple((start, end) for start, end in items)


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)
