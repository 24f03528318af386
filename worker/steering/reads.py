"""Reads of one step: rows of points copied into buffers, then to the regions of their requests.

Requests that read the same site share one buffer [rows, layers, width]. A region holds one row
for each position that its capture wants; a recomputed position lands on the same row again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from app.steering.spec import FOREVER as OPEN
from app.steering.spec import Capture, Reduce, Site
from worker.steering.steers import Rows, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker.steering.plan import Run
    from worker.steering.points import Shape
    from worker.steering.region import RegionWriter

    Ints = npt.NDArray[np.int64]

# More different sets of layers than this at one site share a buffer over all of them.
_SETS_MAX = 8


@dataclass(frozen=True, slots=True, eq=False)
class TenantRead:
    """One capture of a request. Span i covers [starts[i], ends[i]), from region row `first[i]`.

    `layers` are those that run here, from `place` on among the layers of the region.
    `directions` is [k, width] float64 for Reduce.project. `dtype` names what is read.
    """

    site: Site
    layers: tuple[int, ...]
    place: int
    before: bool
    region: RegionWriter
    starts: Ints
    ends: Ints
    first: Ints
    bounds: Ints
    dtype: str
    reduce: Reduce = Reduce.none
    directions: npt.NDArray[np.float64] | None = None

    def store(self, rows: npt.NDArray[np.generic], row: int) -> None:
        """Put rows [n, layers, width] of a step, as stored, into the region from `row` on."""
        if self.reduce in (Reduce.norm, Reduce.project):
            rows = self._reduced(widened(rows, self.dtype))
        self.region.put(rows, row, self.place)

    def _reduced(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        if self.directions is None:
            norms: npt.NDArray[np.float32] = np.linalg.norm(rows, axis=-1, keepdims=True).astype(
                np.float32
            )
            return norms
        scores: npt.NDArray[np.float32] = (rows @ self.directions.T).astype(np.float32)
        return scores


@dataclass(frozen=True, slots=True)
class Member:
    """A run inside a group: `count` rows from `offset` of the buffer, the layers' places there.

    They are the positions from `position` on and belong to the region's rows from `row` on. A
    step that reuses the plan is `run.position - position` further.
    """

    run: int
    read: TenantRead
    offset: int
    count: int
    position: int
    row: int
    layers: slice | list[int]


@dataclass(slots=True)
class ReadGroup:
    """Reads of the same points: one `buffer` [rows, points, width] for all of them."""

    points: tuple[int, ...]
    before: bool
    rows: Rows
    buffer: torch.Tensor
    members: list[Member]


def make_read(
    capture: Capture,
    region: RegionWriter,
    directions: npt.NDArray[np.float64] | None,
    shape: Shape,
) -> TenantRead:
    """Resolve a capture whose region was made for it; some layer of it runs here."""
    spans = np.array(capture.spans if capture.spans is not None else [(0, OPEN)], dtype=np.int64)
    spans = spans.reshape(-1, 2)
    lengths = spans[:, 1] - spans[:, 0]
    if (lengths <= 0).any() or (spans[1:, 0] < spans[:-1, 1]).any() or (spans < 0).any():
        msg = "the spans of a capture are empty, negative or not in order"
        raise ValueError(msg)
    layers = tuple(filter(shape.runs, capture.layers))
    return TenantRead(
        site=capture.site,
        layers=layers,
        place=capture.layers.index(layers[0]),
        before=capture.before,
        region=region,
        starts=spans[:, 0],
        ends=spans[:, 1],
        first=np.cumsum(lengths) - lengths,
        bounds=np.unique(spans[(spans > 0) & (spans < OPEN)]),
        dtype=str(shape.dtype).removeprefix("torch."),
        reduce=capture.reduce,
        directions=directions,
    )


def widened(rows: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float64]:
    """Give stored rows as numbers: uint16 are the bits of `dtype`, bfloat16 or float16."""
    if dtype == "float16":
        return rows.view(np.float16).astype(np.float64)
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return rows.astype(np.float64)


@dataclass(slots=True)
class _Wish:
    """Some rows of a run that one of its reads wants."""

    run: int
    read: TenantRead
    position: int
    count: int
    row: int


def plan_reads(runs: Sequence[Run], shape: Shape) -> list[ReadGroup]:
    """Group what the runs want to read in this step."""
    wanted: dict[tuple[Site, bool], dict[tuple[int, ...], list[_Wish]]] = {}
    for index, run in enumerate(runs):
        for read in run.tenant.reads:
            for wish in _wishes(index, run, read):
                sets = wanted.setdefault((read.site, read.before), {})
                sets.setdefault(read.layers, []).append(wish)
    groups = []
    for (site, before), sets in wanted.items():
        if len(sets) > _SETS_MAX:
            union = tuple(sorted({layer for layers in sets for layer in layers}))
            wishes = [wish for members in sets.values() for wish in members]
            sets = {union: sorted(wishes, key=lambda wish: wish.run)}  # noqa: PLW2901 (merged)
        groups += [_group(runs, site, before, item, shape) for item in sets.items()]
    return groups


def _wishes(index: int, run: Run, read: TenantRead) -> list[_Wish]:
    begin, end = run.position, run.position + run.count
    found = []
    for which in np.flatnonzero((read.starts < end) & (read.ends > begin)).tolist():
        start = max(int(read.starts[which]), begin)
        stop = min(int(read.ends[which]), end)
        row = int(read.first[which]) + start - int(read.starts[which])
        found.append(_Wish(index, read, start, stop - start, row))
    return found


def _group(
    runs: Sequence[Run],
    site: Site,
    before: bool,  # noqa: FBT001 (half of a key)
    item: tuple[tuple[int, ...], list[_Wish]],
    shape: Shape,
) -> ReadGroup:
    layers, wishes = item
    place = {layer: index for index, layer in enumerate(layers)}
    members, rows, offset = [], [], 0
    for wish in wishes:
        own = wish.read.layers
        run = runs[wish.run]
        first = run.row + wish.position - run.position
        rows.append(np.arange(first, first + wish.count))
        members.append(
            Member(
                run=wish.run,
                read=wish.read,
                offset=offset,
                count=wish.count,
                position=wish.position,
                row=wish.row,
                layers=slice(None) if own == layers else [place[layer] for layer in own],
            )
        )
        offset += wish.count
    points = tuple(shape.point(site, layer) for layer in layers)
    return ReadGroup(
        points=points,
        before=before,
        rows=rows_of(np.concatenate(rows), shape.device),
        buffer=torch.empty(
            (offset, len(layers), shape.widths[site]), dtype=shape.dtype, device=shape.device
        ),
        members=members,
    )
