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
    changed = None
    if steer.stages:
        changed = _run_stages(steer, x, banks)
    else:
        _add(steer, x, banks)
    chosen = changed
    if steer.checked:
        # A comparison with NaN is false: a row is fit when its largest magnitude fits the dtype.
        # (The norm of order infinity says the same, twenty times slower on a CPU.)
        peak = x.abs().amax(dim=-1, keepdim=True)
        fit = peak <= torch.finfo(hidden.dtype).max
        chosen = fit if changed is None else fit & changed
        _mark(unfit, rows, ~fit.squeeze(1))
    target = hidden if residual is None else residual
    if chosen is None:
        _write(target, rows, x)
        if residual is not None:
            _clear(hidden, rows)
        return
    old = h if r is None else r
    _write(target, rows, torch.where(chosen, x.to(old.dtype), old))
    if residual is not None:
        _write(hidden, rows, h.masked_fill(chosen, 0))


def _mark(unfit: torch.Tensor, rows: Rows, misfit: torch.Tensor) -> None:
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
    careful = steer.careful
    before = None if careful is None else x.index_select(0, careful)
    for stage in steer.stages:
        view = x if stage.heads == 1 else x.view(-1, stage.width)
        table = banks.table(stage.width)
        if not stage.empty:
            _move(stage, view, table)
        if stage.replaced is not None:
            local, place = stage.replaced
            view.index_copy_(0, local, table.index_select(0, place))
    if careful is None or before is None:
        return None
    moved = (x.index_select(0, careful) != before).any(dim=1, keepdim=True)
    changed = moved.new_ones((len(x), 1))
    return changed.index_copy_(0, careful, moved)


def _move(stage: Stage, view: torch.Tensor, table: torch.Tensor) -> None:
    """Add to each entry's row of `view` its vector times a number that depends on the row."""
    vectors = stage.vectors
    if vectors is None:
        vectors = table.index_select(0, stage.place)
    factor = stage.a
    if (normed := stage.normed) is not None:
        moves = normed.a * _norms(view.index_select(0, normed.local))
        factor = factor.index_copy(0, normed.which, moves)
    if (projected := stage.projected) is not None:
        units = projected.vectors
        if units is None:
            units = vectors.index_select(0, projected.which)
        # Summed in float64: what is left of a removed direction is a difference of large numbers.
        products = view.index_select(0, projected.local).mul_(units)
        dot = products.sum(dim=1, keepdim=True, dtype=torch.float64)
        low, high = projected.low, projected.high
        clamped = torch.minimum(torch.maximum(dot, low), high)
        moves = projected.a * dot + (clamped - dot)
        factor = factor.index_copy(0, projected.which, moves.float())
    # The product is rounded by itself both times: a row must not depend on which way it takes.
    if stage.local is None:
        view.add_(factor * vectors)
    else:
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
