"""The steering core of one engine process: who is in, what this step does, what went wrong.

    admit -> (prepare -> work, work, ... -> finish) per step -> dismiss

No method raises into the forward pass. What fails is flagged on the status board for the request
that it belongs to; its rows then run unsteered and the front turns the flag into an error.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from app.steering.spec import Reduce
from worker.steering.bank import Banks, UnknownVectorError
from worker.steering.board import Flag, StatusBoard
from worker.steering.carrier import unpack
from worker.steering.layer import apply_work
from worker.steering.plan import Run, StepPlan, Tenant, build_plan
from worker.steering.program import build_program, drop_program
from worker.steering.reads import TenantRead, make_read
from worker.steering.region import RegionWriter, region_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from app.steering.spec import Capture
    from worker.steering.carrier import Read
    from worker.steering.points import Shape

_log = logging.getLogger(__name__)
# A request may bring 2,097,152 numbers; the rows of one width hold 1 GiB at most.
_BANK_BYTES = 1 << 30


class SteeringCore:
    """Steers and captures for all requests of one engine process (one rank)."""

    def __init__(
        self,
        *,
        shape: Shape,
        board: StatusBoard,
        vectors: Path,
        rank: int = 0,
        captures: bool = True,
    ) -> None:
        """`vectors` is the folder of stored vectors: <id>.npy, float32 [rows, width].

        Of ranks that hold the same rows, one `captures` them.
        """
        self._shape = shape
        self._board = board
        self._rank = rank
        self._captures = captures
        self._vectors = vectors
        self._banks = Banks(self._load, shape.device, _BANK_BYTES)
        self._tenants: dict[str, Tenant] = {}
        self._plan: StepPlan | None = None
        self._runs: Sequence[Run] = ()
        self._active = False

    @property
    def shape(self) -> Shape:
        """The model as this core sees it."""
        return self._shape

    @property
    def tenants(self) -> int:
        """How many requests are inside."""
        return len(self._tenants)

    def admit(self, request_id: str, carried: dict[str, Any]) -> None:
        """Take a request in; a defect of it is flagged, never raised."""
        if request_id in self._tenants:
            return
        ticket = carried.get("ticket")
        if not isinstance(ticket, int):
            _log.error("request %s carries no ticket", request_id)
            return
        self._board.reset(ticket, self._rank, Flag.seen)
        tenant = Tenant(ticket=ticket)
        self._tenants[request_id] = tenant
        try:
            self._settle_in(tenant, carried)
        except UnknownVectorError:
            self._flag(tenant, Flag.unknown_vector)
        except Exception:  # noqa: BLE001 (flagged, never raised)
            _log.exception("request %s cannot be steered", request_id)
            self._flag(tenant, Flag.plan_failed)

    def dismiss(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have finished or were aborted."""
        for request_id in request_ids:
            tenant = self._tenants.pop(request_id, None)
            if tenant is not None:
                self._empty(tenant)

    def close(self) -> None:
        """Let go of everything that requests hold; nothing runs any more."""
        self.dismiss(list(self._tenants))

    def prepare(
        self,
        request_ids: Sequence[str],
        counts: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
    ) -> None:
        """Plan the step about to run: request i has `counts[i]` rows from position `starts[i]`."""
        self._active = False
        if not self._tenants:
            self._runs = ()
            return
        runs, row = [], 0
        listed = zip(request_ids, counts.tolist(), starts.tolist(), strict=True)
        for index, (request_id, count, start) in enumerate(listed):
            tenant = self._tenants.get(request_id)
            if tenant is not None and count:
                runs.append(Run(tenant, index, row, count, start))
            row += count
        self._runs = runs
        if not runs:
            return
        if self._plan is None or not self._plan.fits(runs):
            self._plan = self._build(runs, row)
        self._active = self._plan is not None

    def work(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Do a point's work in the step that was prepared; nothing outside of such a step.

        hidden and residual are [..., rows, width] with nothing but ones in front.
        """
        if self._active:
            self._on_tensors(point, hidden, residual)

    def _on_tensors(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        plan = self._plan
        assert plan is not None
        work = plan.work.get(point)
        if work is None:
            return
        try:
            width = hidden.shape[-1]
            apply_work(
                work,
                hidden.view(-1, width),
                None if residual is None else residual.view(-1, width),
                self._banks,
                plan.unfit,
            )
        except Exception:  # noqa: BLE001 (flagged, never raised)
            _log.exception("steering failed at point %d", point)
            self._active = False
            self._plan = None
            for run in self._runs:
                self._flag(run.tenant, Flag.plan_failed)

    def finish(self) -> None:
        """End the step: captured rows to their regions, misfits and progress to the board."""
        active, self._active = self._active, False
        if not self._runs:
            return
        plan = self._plan
        if active and plan is not None:
            if plan.checked:
                self._report_misfits(plan)
            for group in plan.groups:
                rows = _as_stored(group.buffer)
                for member in group.members:
                    run = self._runs[member.run]
                    # A plan that serves again in a later step of decoding is some positions on.
                    row = member.row + run.position - plan.runs[member.run].position
                    part = slice(member.offset, member.offset + member.count)
                    self._store(run, member.read, rows[part, member.layers], row)
        columns = np.array(
            [(run.tenant.ticket, run.position, run.position + run.count) for run in self._runs],
            dtype=np.int64,
        )
        self._board.advance(self._rank, columns[:, 0], columns[:, 1], columns[:, 2])

    def abandon_step(self) -> None:
        """Drop the step's plan after a defect of our own; its requests are flagged."""
        self._active = False
        self._plan = None
        for run in self._runs:
            self._flag(run.tenant, Flag.plan_failed)
        self._runs = ()

    def check_outputs(self, last_hidden: torch.Tensor) -> None:
        """Flag the requests of this step whose final rows are not finite.

        `last_hidden` is [requests of the batch, width], what the logits are made of.
        """
        if not self._runs:
            return
        index = torch.tensor([run.index for run in self._runs], device=last_hidden.device)
        peak = torch.linalg.vector_norm(last_hidden.index_select(0, index), ord=torch.inf, dim=-1)
        fit = (peak <= torch.finfo(last_hidden.dtype).max).tolist()
        for run, fine in zip(self._runs, fit, strict=True):
            if not fine:
                self._flag(run.tenant, Flag.non_finite, keep=True)

    def _settle_in(self, tenant: Tenant, carried: dict[str, Any]) -> None:
        carrier, shape = unpack(carried), self._shape
        for site, layer in carrier.places():
            shape.point(site, layer)  # of all layers: every rank refuses what no rank has
        ops = [op for op in carrier.ops if shape.runs(op.layer)]
        if ops:
            tenant.program = build_program(ops, self._banks, shape)
        for read in carrier.reads if self._captures else ():
            if any(map(shape.runs, read.capture.layers)):
                tenant.reads = (*tenant.reads, self._open(read))

    def _open(self, read: Read) -> TenantRead:
        capture, shape = read.capture, self._shape
        dtype = str(shape.dtype).removeprefix("torch.")
        wanted = region_shape(capture, read.rows, shape.widths[capture.site], dtype)
        directions = self._directions(capture) if capture.reduce is Reduce.project else None
        region = RegionWriter(Path(read.region), wanted)
        try:
            return make_read(capture, region, directions, shape)
        except BaseException:
            region.close()
            raise

    def _directions(self, capture: Capture) -> npt.NDArray[np.float64]:
        rows = [self._load(item.vector)[item.row] for item in capture.directions]
        directions = np.array(rows, dtype=np.float64)
        if directions.shape[1:] != (self._shape.widths[capture.site],):
            msg = f"capture {capture.name} projects on vectors of {directions.shape[1:]} numbers"
            raise ValueError(msg)
        if not np.isfinite(directions).all():
            msg = f"capture {capture.name} projects on numbers that are not finite"
            raise ValueError(msg)
        if capture.unit:
            norms = np.linalg.norm(directions, axis=1, keepdims=True)
            directions /= np.where(norms > 0, norms, 1.0)
        return directions

    def _build(self, runs: Sequence[Run], rows: int) -> StepPlan | None:
        try:
            return build_plan(runs, rows, self._shape, self._banks)
        except Exception:  # noqa: BLE001 (flagged, never raised)
            _log.exception("the plan of a step failed")
        # Find the culprits one by one; the others get their plan.
        for run in runs:
            try:
                build_plan([run], rows, self._shape, self._banks)
            except Exception:  # noqa: BLE001 (flagged, never raised)
                self._flag(run.tenant, Flag.plan_failed)
        try:
            return build_plan(runs, rows, self._shape, self._banks)
        except Exception:  # noqa: BLE001 (flagged, never raised)
            for run in runs:
                self._flag(run.tenant, Flag.plan_failed)
        return None

    def _report_misfits(self, plan: StepPlan) -> None:
        unfit = plan.unfit.cpu().numpy()
        if not unfit.any():
            return
        for run in self._runs:
            if unfit[run.row : run.row + run.count].any():
                self._flag(run.tenant, Flag.non_finite, keep=True)
        plan.unfit.zero_()

    def _store(self, run: Run, read: TenantRead, rows: npt.NDArray[np.generic], row: int) -> None:
        try:
            read.store(rows, row)
        except Exception:  # noqa: BLE001 (flagged, never raised)
            _log.exception("captured rows could not be stored")
            self._flag(run.tenant, Flag.plan_failed)

    def _flag(self, tenant: Tenant, flag: Flag, *, keep: bool = False) -> None:
        """Flag a request; unless `keep`, it also leaves all further plans."""
        self._board.flags[self._rank, tenant.ticket] |= int(flag)
        if not keep:
            self._empty(tenant)

    def _empty(self, tenant: Tenant) -> None:
        if tenant.program is not None:
            drop_program(tenant.program, self._banks)
        for read in tenant.reads:
            read.region.close()
        tenant.program = None
        tenant.reads = ()
        # A cached plan may still name this tenant.
        if self._plan is not None and any(run.tenant is tenant for run in self._plan.runs):
            self._plan = None

    def _load(self, vector: str) -> npt.NDArray[np.float32]:
        try:
            stored = np.lib.format.open_memmap(self._vectors / f"{vector}.npy", mode="r")
        except FileNotFoundError as error:
            raise UnknownVectorError(vector) from error
        matrix: npt.NDArray[np.float32] = stored.reshape(1, -1) if stored.ndim == 1 else stored
        return matrix


def _as_stored(buffer: torch.Tensor) -> npt.NDArray[np.generic]:
    rows = buffer.cpu()
    if rows.dtype in (torch.bfloat16, torch.float16):
        rows = rows.view(torch.uint16)
    stored: npt.NDArray[np.generic] = rows.numpy()
    return stored
