"""What happens to the rows of a point: read, steer, read.

The tensor x of a row is `hidden + residual` (a pair) or `hidden` alone, summed in float32. A
steered row is rounded once to the model's dtype and left as residual = x', hidden = 0; no other
row is written. For the vector v, u = v / |v| and strength s:

    add          x' = x + s v                        activation addition (Turner et al. 2023,
    norm_match   x' = x + s |x| u                    arXiv:2308.10248)
    orthogonal   x' = x + (coeff - 1) (x.u) u        directional ablation at coeff 0 (Arditi et
                                                     al. 2024, arXiv:2406.11717)
    cap          x' = x + (clamp(x.u) - x.u) u       projection capping
    replace      x' = v                              activation patching (Meng et al. 2022,
                                                     arXiv:2202.05262)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from worker.steering.bank import Banks
    from worker.steering.plan import Work
    from worker.steering.steers import Rows, Stage, Steer


def apply_work(
    work: Work,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    banks: Banks,
    unfit: torch.Tensor,
) -> None:
    """Do a point's work; hidden and residual are [rows, width], changed in place.

    `unfit` [rows of the batch] is set where an op made a row non-finite.
    """
    if work.before:
        _read(work.before, hidden, residual)
    if work.steer is not None:
        _steer(work.steer, hidden, residual, banks, unfit)
    if work.after:
        _read(work.after, hidden, residual)


def _read(
    reads: list[tuple[Rows, torch.Tensor]], hidden: torch.Tensor, residual: torch.Tensor | None
) -> None:
    for rows, out in reads:
        if residual is None:
            out.copy_(_pick(hidden, rows))
        else:
            torch.add(_pick(hidden, rows), _pick(residual, rows), out=out)


def _pick(source: torch.Tensor, rows: Rows) -> torch.Tensor:
    return source[rows] if isinstance(rows, slice) else source.index_select(0, rows)


def _steer(
    steer: Steer,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    banks: Banks,
    unfit: torch.Tensor,
) -> None:
    rows = steer.rows
    h = _pick(hidden, rows)
    r = None if residual is None else _pick(residual, rows)
    x = h.to(torch.float32, copy=True)
    if r is not None:
        x.add_(r)
    keep = None
    if steer.stages:
        keep = _run_stages(steer, x, banks)
    else:
        _add(steer, x, banks)
    if not steer.checked:
        # Nothing that is added can carry a row beyond its dtype: no need to look at the sums.
        _write(hidden if residual is None else residual, rows, x)
        if residual is not None:
            _clear(hidden, rows)
        return
    # Comparison with NaN is false: a row is fit when its largest magnitude fits the dtype.
    peak = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True)
    fit = peak <= torch.finfo(hidden.dtype).max
    chosen = fit if keep is None else fit & keep
    if r is None:
        _write(hidden, rows, torch.where(chosen, x, h))
    else:
        _write(residual, rows, torch.where(chosen, x, r))
        _write(hidden, rows, h.masked_fill(chosen, 0))
    misfit = ~fit.squeeze(1)
    if isinstance(rows, slice):
        unfit[rows] |= misfit
    else:
        unfit.index_put_((rows,), misfit | unfit.index_select(0, rows))


def _add(steer: Steer, x: torch.Tensor, banks: Banks) -> None:
    """Add the sums of a point to x [rows, width]."""
    delta, scale = steer.delta, None
    if delta is None:
        assert steer.place is not None
        delta, scale = banks.table(steer.width).index_select(0, steer.place), steer.scale
    if steer.norm is not None:
        norms = _norms(x)
        if steer.owner is not None:
            norms = norms.index_select(0, steer.owner)
        factor = torch.where(steer.norm, norms, norms.new_ones(()))
        scale = factor if scale is None else factor * scale
    if steer.owner is not None:
        x.index_add_(0, steer.owner, delta if scale is None else delta * scale)
    elif scale is None:
        x.add_(delta)
    else:
        x.addcmul_(delta, scale)


def _run_stages(steer: Steer, x: torch.Tensor, banks: Banks) -> torch.Tensor | None:
    """Run the stages of a point on x [rows, width].

    Returns which rows changed, [rows, 1], when some may not have: they stay as they are, bit for
    bit. None means that all of them count as changed.
    """
    before = x.clone() if steer.careful else None
    for stage in steer.stages:
        view = x if stage.heads == 1 else x.view(-1, stage.width)
        table = banks.table(stage.width)
        if len(stage.local):
            _move(stage, view, table)
        if stage.replaced is not None:
            local, place = stage.replaced
            view.index_copy_(0, local, table.index_select(0, place))
    return None if before is None else (x != before).any(dim=1, keepdim=True)


def _move(stage: Stage, view: torch.Tensor, table: torch.Tensor) -> None:
    """Add to each entry's row of `view` its vector times a number that depends on the row."""
    vectors = table.index_select(0, stage.place)
    factor = stage.a
    if stage.norm is not None or stage.dot is not None or stage.cap is not None:
        x = view.index_select(0, stage.local)
        if stage.norm is not None:
            factor = torch.where(stage.norm, factor * _norms(x), factor)
        if stage.dot is not None or stage.cap is not None:
            # In float64: what is left of a removed direction is a difference of large numbers.
            dot = (x.double() * vectors.double()).sum(dim=1, keepdim=True)
            if stage.dot is not None:
                factor = torch.where(stage.dot, factor * dot.float(), factor)
            if stage.cap is not None:
                caps, low, high = stage.cap
                clamped = torch.minimum(torch.maximum(dot, low), high)
                factor = torch.where(caps, (clamped - dot).float(), factor)
    view.index_add_(0, stage.local, factor * vectors)


def _norms(x: torch.Tensor) -> torch.Tensor:
    """|x| of each row, [rows, 1] float32, summed in float64."""
    norms: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    return norms.float()


def _write(target: torch.Tensor | None, rows: Rows, value: torch.Tensor) -> None:
    assert target is not None
    if isinstance(rows, slice):
        target[rows] = value
    else:
        target.index_copy_(0, rows, value.to(target.dtype))


def _clear(target: torch.Tensor, rows: Rows) -> None:
    if isinstance(rows, slice):
        target[rows].zero_()
    else:
        target.index_fill_(0, rows, 0)
