"""The plan of one step: at each point which rows are steered by what, and which are captured.

Built on the host from the batch's own order, with a few numpy calls for the whole batch, and kept
while the batch stays the same. A point then finds its work ready: no loop over requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from worker.steering.program import FOREVER, next_after
from worker.steering.reads import plan_reads
from worker.steering.steers import Steer, plan_steers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker.steering.bank import Banks
    from worker.steering.points import Shape
    from worker.steering.program import Program
    from worker.steering.reads import ReadGroup, TenantRead
    from worker.steering.steers import Rows

    Ints = npt.NDArray[np.int64]


@dataclass(eq=False, slots=True)
class Tenant:
    """A request inside the engine: its program, its reads, and its ticket for the board."""

    ticket: int
    program: Program | None = None
    reads: tuple[TenantRead, ...] = ()


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
class Work:
    """What one point does, in this order: reads before the ops, the ops, reads after them.

    Each read names rows of the batch and where they are copied to, [rows, width].
    """

    steer: Steer | None = None
    before: list[tuple[Rows, torch.Tensor]] = field(default_factory=list)
    after: list[tuple[Rows, torch.Tensor]] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """Everything a step needs. `unfit` [rows] collects the rows that steering made non-finite."""

    runs: tuple[Run, ...]
    work: dict[int, Work]
    groups: list[ReadGroup]
    unfit: torch.Tensor
    checked: bool
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


def build_plan(runs: Sequence[Run], rows: int, shape: Shape, banks: Banks) -> StepPlan:
    """Plan a step of `rows` rows in all, for the runs of tenants among them.

    Raises whatever a defect of one of the tenants makes numpy or torch raise.
    """
    work: dict[int, Work] = {}
    steers = plan_steers(runs, shape, banks)
    for point, steer in steers.items():
        work[point] = Work(steer=steer)
    groups = plan_reads(runs, shape)
    for group in groups:
        for place, point in enumerate(group.points):
            here = work.setdefault(point, Work())
            reads = here.before if group.before else here.after
            reads.append((group.rows, group.buffer[:, place]))
    return StepPlan(
        runs=tuple(runs),
        work=work,
        groups=groups,
        unfit=torch.zeros(rows, dtype=torch.bool, device=shape.device),
        checked=any(steer.checked for steer in steers.values()),
        valid_until=np.array([_valid_until(run) for run in runs], dtype=np.int64),
        decode=all(run.count == 1 for run in runs),
    )


def _valid_until(run: Run) -> int:
    program = run.tenant.program
    until = program.next_change(run.position) if program else FOREVER
    return min([until, *(next_after(read.bounds, run.position) for read in run.tenant.reads)])
