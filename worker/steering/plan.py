"""The plan of one step: for each layer which rows are steered by what, and which are captured.

Built on the host from the batch's own order, with a few numpy calls for the whole batch, and kept
while the batch stays the same. A layer then finds its work ready: no loop over requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from worker.steering.program import FOREVER, Segments, join

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker.steering.bank import VectorBank
    from worker.steering.program import Program
    from worker.steering.region import CaptureRegion

    Ints = npt.NDArray[np.int64]

Rows = slice | torch.Tensor  # rows of the batch: a range where they follow each other
# Below this many numbers the deltas of all layers are gathered at once and kept with the plan.
_GATHER_NUMBERS = 16 * 1024 * 1024
# More different sets of captured layers than this share one buffer over the union of the layers.
_CAPTURE_GROUPS = 8


@dataclass(eq=False, slots=True)
class Tenant:
    """A request inside the engine: its program, its region, and its ticket for the board."""

    ticket: int
    program: Program | None = None
    capture_layers: tuple[int, ...] = ()
    region: CaptureRegion | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [row, row + count) of the batch: a tenant's positions from `position` on.

    `index` is the request's place in the batch.
    """

    tenant: Tenant
    index: int
    row: int
    count: int
    position: int


@dataclass(slots=True)
class LayerSteer:
    """What one layer adds: `delta` [entries, width], or places and scales to gather it from.

    Entry i belongs to row i of `rows`, or to row `owner[i]` when a row has several entries.
    `norm` [entries, 1] is true where delta is to be multiplied by the row's norm.
    """

    rows: Rows
    place: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor | None = None
    owner: torch.Tensor | None = None
    delta: torch.Tensor | None = None


@dataclass(slots=True)
class CaptureGroup:
    """Requests that capture the same layers: one buffer [layers, rows, width] for all of them."""

    layers: tuple[int, ...]
    rows: Rows
    buffer: torch.Tensor
    members: list[CaptureMember]


@dataclass(frozen=True, slots=True)
class CaptureMember:
    """A run inside a group: its first row in the buffer and its layers' places there."""

    run: int
    offset: int
    layers: slice | list[int]


@dataclass(slots=True)
class StepPlan:
    """Everything a step needs. `unfit` [rows] collects the rows that steering made non-finite."""

    runs: tuple[Run, ...]
    steer: list[LayerSteer | None]
    capture: list[list[tuple[Rows, torch.Tensor]]]
    groups: list[CaptureGroup]
    unfit: torch.Tensor
    valid_until: Ints
    decode: bool

    def fits(self, runs: Sequence[Run]) -> bool:
        """Say whether the plan also serves these runs: same rows, nothing changing in between."""
        if not self.decode or len(runs) != len(self.runs):
            return False
        for old, new, until in zip(self.runs, runs, self.valid_until, strict=True):
            if (
                new.tenant is not old.tenant
                or new.row != old.row
                or new.count != 1
                or not old.position <= new.position < until
            ):
                return False
        return True


@dataclass(frozen=True, slots=True)
class Shape:
    """The model as the plan sees it."""

    n_layers: int
    width: int
    dtype: torch.dtype
    device: torch.device


def build_plan(runs: Sequence[Run], rows: int, shape: Shape, bank: VectorBank) -> StepPlan:
    """Plan a step of `rows` rows; raises only on a defect in a program or a region."""
    steer = _plan_steer(runs, shape, bank)
    groups = _plan_groups(runs, shape)
    capture: list[list[tuple[Rows, torch.Tensor]]] = [[] for _ in range(shape.n_layers)]
    for group in groups:
        for place, layer in enumerate(group.layers):
            capture[layer].append((group.rows, group.buffer[place]))
    changes = [
        run.tenant.program.next_change(run.position) if run.tenant.program else FOREVER
        for run in runs
    ]
    return StepPlan(
        runs=tuple(runs),
        steer=steer,
        capture=capture,
        groups=groups,
        unfit=torch.zeros(rows, dtype=torch.bool, device=shape.device),
        valid_until=np.array(changes, dtype=np.int64),
        decode=all(run.count == 1 for run in runs),
    )


def _plan_steer(runs: Sequence[Run], shape: Shape, bank: VectorBank) -> list[LayerSteer | None]:
    plan: list[LayerSteer | None] = [None] * shape.n_layers
    cuts: list[Segments] = []
    overlaps = False
    for run in runs:
        program = run.tenant.program
        if program is None or program.empty:
            continue
        cut = program.cut(run.position, run.position + run.count)
        shift = run.row - run.position
        cuts.append(cut._replace(start=cut.start + shift, end=cut.end + shift))
        overlaps = overlaps or program.overlaps
    if not cuts:
        return plan
    entries = _expand(join(cuts))
    if not len(entries.layer):
        return plan
    return _split_by_layer(plan, entries, shape, bank, overlaps=overlaps)


def _expand(cut: Segments) -> Segments:
    """Turn row ranges into single rows, ordered by layer and then by request and op."""
    cut = cut.take(np.argsort(cut.layer, kind="stable"))
    lengths = cut.end - cut.start
    if (lengths == 1).all():
        return cut
    which = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.cumsum(lengths) - lengths
    rows = cut.start[which] + np.arange(len(which)) - begins[which]
    return cut.take(which)._replace(start=rows, end=rows + 1)


def _split_by_layer(
    plan: list[LayerSteer | None],
    entries: Segments,
    shape: Shape,
    bank: VectorBank,
    *,
    overlaps: bool,
) -> list[LayerSteer | None]:
    place = torch.from_numpy(entries.place).to(shape.device)
    scale = torch.from_numpy(entries.scale).to(shape.device).unsqueeze(1)
    norm = torch.from_numpy(entries.norm).to(shape.device).unsqueeze(1)
    delta = None
    if len(entries.layer) * shape.width <= _GATHER_NUMBERS:
        delta = bank.table.index_select(0, place).mul_(scale)
    ends = np.searchsorted(entries.layer, np.arange(shape.n_layers), side="right")
    # Rows follow each other in [begin, end) exactly when no break lies strictly inside.
    breaks = np.concatenate([[0], np.cumsum(np.diff(entries.start) != 1), [0]])
    norms = np.concatenate([[0], np.cumsum(entries.norm)])
    begin = 0
    for layer, end in enumerate(ends.tolist()):
        if end > begin:
            here = slice(begin, end)
            rows, owner = _rows_of(
                entries.start[here],
                shape.device,
                overlaps=overlaps,
                follow=bool(breaks[end - 1] == breaks[begin]),
            )
            plan[layer] = LayerSteer(
                rows=rows,
                place=place[here],
                scale=scale[here],
                norm=norm[here] if norms[end] > norms[begin] else None,
                owner=owner,
                delta=None if delta is None else delta[here],
            )
        begin = end
    return plan


def _rows_of(
    rows: Ints, device: torch.device, *, overlaps: bool, follow: bool
) -> tuple[Rows, torch.Tensor | None]:
    if follow:
        return slice(int(rows[0]), int(rows[-1]) + 1), None
    if overlaps:
        unique, owner = np.unique(rows, return_inverse=True)
        if len(unique) < len(rows):
            return (
                torch.from_numpy(unique).to(device),
                torch.from_numpy(owner.reshape(-1)).to(device),
            )
    return torch.from_numpy(rows).to(device), None


def _plan_groups(runs: Sequence[Run], shape: Shape) -> list[CaptureGroup]:
    wanted: dict[tuple[int, ...], list[int]] = {}
    for index, run in enumerate(runs):
        if run.tenant.region is not None:
            wanted.setdefault(run.tenant.capture_layers, []).append(index)
    if len(wanted) > _CAPTURE_GROUPS:
        union = tuple(sorted({layer for layers in wanted for layer in layers}))
        wanted = {union: sorted(index for indices in wanted.values() for index in indices)}
    return [_group(runs, layers, indices, shape) for layers, indices in wanted.items()]


def _group(
    runs: Sequence[Run], layers: tuple[int, ...], indices: list[int], shape: Shape
) -> CaptureGroup:
    place = {layer: index for index, layer in enumerate(layers)}
    members, offset = [], 0
    for index in indices:
        run = runs[index]
        own = run.tenant.capture_layers
        chosen = slice(None) if own == layers else [place[layer] for layer in own]
        members.append(CaptureMember(run=index, offset=offset, layers=chosen))
        offset += run.count
    rows = np.concatenate([np.arange(runs[i].row, runs[i].row + runs[i].count) for i in indices])
    follow = bool((np.diff(rows) == 1).all())
    return CaptureGroup(
        layers=layers,
        rows=_rows_of(rows, shape.device, overlaps=False, follow=follow)[0],
        buffer=torch.empty(
            (len(layers), offset, shape.width), dtype=shape.dtype, device=shape.device
        ),
        members=members,
    )
