"""Writes of one step: for each point its steered rows and what happens to them, stage by stage.

Most requests only add, once a row: then all of a point is one matrix of sums (`delta`). Anything
else is a list of stages, each one vectorised operation over the rows that it concerns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from worker.steering.program import (
    ADD,
    ADD_NORM,
    CAP,
    POINT_KEYS,
    PROJECT,
    REPLACE,
    Segments,
    join,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker.steering.bank import Banks
    from worker.steering.plan import Run
    from worker.steering.points import Shape

    Ints = npt.NDArray[np.int64]

Rows = slice | torch.Tensor  # rows of the batch: a range where they follow each other
# Below this many numbers the sums of all points are gathered at once and kept with the plan.
_GATHER_NUMBERS = 16 * 1024 * 1024


@dataclass(slots=True)
class Stage:
    """Entries that see the same x: entry i belongs to place `local[i]` of x seen as [n, width].

    `local` is None when entry i belongs to place i. `heads` rows of that view make one row of x
    (1: whole rows). The numbers of the entries are columns [entries, 1]; `vectors` are their rows,
    None where they are gathered when the stage runs. `normed` and `projected` tell which entries
    need |x| and x.u. `replaced` are the places in the view, and of the vectors, of the entries
    that take their vector as it is.
    """

    width: int
    heads: int
    local: torch.Tensor | None
    place: torch.Tensor
    a: torch.Tensor
    vectors: torch.Tensor | None = None
    normed: Normed | None = None
    projected: Projected | None = None
    replaced: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is added to any row."""
        return len(self.place) == 0


@dataclass(slots=True)
class Normed:
    """Entries `which` add a |x| u: `local` are their places in the view, `a` their numbers."""

    which: torch.Tensor
    local: torch.Tensor
    a: torch.Tensor


@dataclass(slots=True)
class Projected:
    """Entries `which` add (a x.u + clamp(x.u, low, high) - x.u) u; the numbers are float64.

    Of the two halves one is nothing: a is 0 for a cap, low and high are infinite without one.
    `vectors` are their rows where those of the stage are gathered beforehand.
    """

    which: torch.Tensor
    local: torch.Tensor
    a: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    vectors: torch.Tensor | None = None


@dataclass(slots=True)
class Steer:
    """What one point does to `rows`: the sums of `delta`, or the `stages` one after the other.

    With sums, entry i belongs to row i of `rows`, or to row `owner[i]` when a row has several;
    `norm` [entries, 1] is true where delta is to be multiplied by the row's norm. `checked` asks
    for a look at the result: could it be non-finite? `careful` are the rows, counted among `rows`,
    that stay as they are when no stage changed them: a cap may leave a row.
    """

    rows: Rows
    checked: bool
    width: int
    place: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    owner: torch.Tensor | None = None
    delta: torch.Tensor | None = None
    stages: list[Stage] = field(default_factory=list)
    careful: torch.Tensor | None = None


def plan_steers(runs: Sequence[Run], shape: Shape, banks: Banks) -> dict[int, Steer]:
    """Find what every point has to do to the rows of this step."""
    cuts: list[Segments] = []
    overlaps, tame = False, shape.dtype is not torch.float16
    for run in runs:
        program = run.tenant.program
        if program is None or program.empty:
            continue
        cut = program.cut(run.position, run.position + run.count)
        shift = run.row - run.position
        cuts.append(cut._replace(start=cut.start + shift, end=cut.end + shift))
        overlaps = overlaps or program.overlaps
        tame = tame and program.tame
    if not cuts:
        return {}
    entries = _expand(join(cuts))
    if not len(entries.key):
        return {}
    planner = _Planner(entries, shape, banks, overlaps=overlaps, checked=not tame)
    return planner.plan()


def rows_of(rows: Ints, device: torch.device) -> Rows:
    """Give rows as a range where they follow each other, as an index otherwise."""
    if bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def _expand(cut: Segments) -> Segments:
    """Turn row ranges into single rows, ordered by key and then by request and op."""
    cut = cut.take(np.argsort(cut.key, kind="stable"))
    lengths = cut.end - cut.start
    if (lengths == 1).all():
        return cut
    which = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.cumsum(lengths) - lengths
    rows = cut.start[which] + np.arange(len(which)) - begins[which]
    return cut.take(which)._replace(start=rows, end=rows + 1)


class _Planner:
    """Splits the entries of a step by point."""

    def __init__(
        self, entries: Segments, shape: Shape, banks: Banks, *, overlaps: bool, checked: bool
    ) -> None:
        self._entries = entries
        self._shape = shape
        self._banks = banks
        self._overlaps = overlaps
        self._checked = checked
        self._gathered = 0
        self._simple = entries.kind <= ADD_NORM
        self._place = torch.from_numpy(entries.place).to(shape.device)
        self._scale = self._column(entries.a)
        self._norm = self._column(entries.kind == ADD_NORM)

    def plan(self) -> dict[int, Steer]:
        points = self._entries.key // POINT_KEYS
        edges = np.flatnonzero(np.diff(points)) + 1
        begins = [0, *edges.tolist()]
        ends = [*edges.tolist(), len(points)]
        # Sums of stage 0 over whole rows, and nothing else: one matrix a point.
        plain = self._simple & (self._entries.key % POINT_KEYS == 0)
        whole = bool(plain.all())
        delta, width = None, 0
        if whole:
            widths = {self._shape.width_at(int(points[begin])) for begin in begins}
            width = widths.pop() if len(widths) == 1 else 0
            if width and len(points) * width <= _GATHER_NUMBERS:
                table = self._banks.table(width)
                delta = table.index_select(0, self._place).mul_(self._scale)
        rows = self._entries.start
        # Rows follow each other in [begin, end) exactly when no break lies strictly inside.
        breaks = np.concatenate([[0], np.cumsum(np.diff(rows) != 1), [0]])
        norms = np.concatenate([[0], np.cumsum(self._entries.kind == ADD_NORM)])
        steers = {}
        for begin, end in zip(begins, ends, strict=True):
            point = int(points[begin])
            here = slice(begin, end)
            if not whole and not plain[here].all():
                steers[point] = self._staged(point, here)
                continue
            found, owner = self._owners(here, follow=bool(breaks[end - 1] == breaks[begin]))
            steers[point] = Steer(
                rows=found,
                checked=self._checked,
                width=self._shape.width_at(point),
                place=self._place[here],
                scale=self._scale[here],
                norm=self._norm[here] if norms[end] > norms[begin] else None,
                owner=owner,
                delta=self._delta(point, here) if delta is None else delta[here],
            )
        return steers

    def _delta(self, point: int, here: slice) -> torch.Tensor | None:
        """Gather the sums of one point; no bit of them depends on what other points do."""
        width, place = self._shape.width_at(point), self._place[here]
        self._gathered += len(place) * width
        if self._gathered > _GATHER_NUMBERS:
            return None
        return self._banks.table(width).index_select(0, place).mul_(self._scale[here])

    def _owners(self, here: slice, *, follow: bool) -> tuple[Rows, torch.Tensor | None]:
        rows = self._entries.start[here]
        if follow:
            return slice(int(rows[0]), int(rows[-1]) + 1), None
        device = self._shape.device
        if self._overlaps:
            unique, owner = np.unique(rows, return_inverse=True)
            if len(unique) < len(rows):
                where = torch.from_numpy(owner.reshape(-1)).to(device)
                return rows_of(unique, device), where
        return torch.from_numpy(rows).to(device), None

    def _staged(self, point: int, here: slice) -> Steer:
        entries = Segments._make(column[here] for column in self._entries)
        rows = np.unique(entries.start)
        width = self._shape.width_at(point)
        capped = np.searchsorted(rows, np.unique(entries.start[entries.kind == CAP]))
        steer = Steer(
            rows=rows_of(rows, self._shape.device),
            checked=self._checked,
            width=width,
            careful=self._index(capped) if len(capped) else None,
        )
        for key in np.unique(entries.key).tolist():
            chosen = entries.take(entries.key == key)
            heads = self._shape.n_heads if key % 2 else 1
            local = np.searchsorted(rows, chosen.start) * heads + chosen.head
            steer.stages.append(self._stage(chosen, local, len(rows) * heads, heads))
        return steer

    def _stage(self, entries: Segments, local: Ints, places: int, heads: int) -> Stage:
        """Plan a stage whose entries lie at `local` of a view with so many places."""
        replaces = entries.kind == REPLACE
        moved, lies = entries.take(~replaces), local[~replaces]
        width = self._shape.width_at(int(entries.key[0]) // POINT_KEYS) // heads
        stage = Stage(
            width=width,
            heads=heads,
            local=None if np.array_equal(lies, np.arange(places)) else self._index(lies),
            place=self._index(moved.place),
            a=self._column(moved.a),
        )
        self._gathered += len(lies) * width
        if self._gathered <= _GATHER_NUMBERS and len(lies):
            stage.vectors = self._banks.table(width).index_select(0, stage.place)
        norms = np.flatnonzero(moved.kind == ADD_NORM)
        if len(norms):
            stage.normed = Normed(
                self._index(norms), self._index(lies[norms]), self._column(moved.a[norms])
            )
        if (moved.kind >= PROJECT).any():
            stage.projected = self._projected(moved, lies, stage.vectors)
        if replaces.any():
            taken = entries.take(replaces)
            stage.replaced = (self._index(local[replaces]), self._index(taken.place))
        return stage

    def _projected(self, moved: Segments, local: Ints, vectors: torch.Tensor | None) -> Projected:
        chosen = np.flatnonzero(moved.kind >= PROJECT)
        which = self._index(chosen)
        caps = moved.kind[chosen] == CAP
        a = np.where(caps, 0.0, moved.a[chosen].astype(np.float64))
        low = np.where(caps, moved.low[chosen].astype(np.float64), -np.inf)
        high = np.where(caps, moved.high[chosen].astype(np.float64), np.inf)
        return Projected(
            which=which,
            local=self._index(local[chosen]),
            a=self._column(a),
            low=self._column(low),
            high=self._column(high),
            vectors=None if vectors is None else vectors.index_select(0, which),
        )

    def _index(self, numbers: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._shape.device)

    def _column(self, numbers: npt.NDArray[np.generic]) -> torch.Tensor:
        return self._index(numbers).unsqueeze(1)  # type: ignore[arg-type]  # any dtype


assert ADD < ADD_NORM < PROJECT < CAP < REPLACE  # `_Planner` compares kinds
