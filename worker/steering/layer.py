"""What happens to the stream after one layer: steer the rows of the plan, then capture.

The stream x of a row is `hidden + residual` (fused layers) or `hidden` alone, summed in float32.
A steered row is rounded once to the model's dtype and left as residual = x', hidden = 0; no other
row is written. For v at unit length u and strength s (as in activation addition, Turner et al.
2023, arXiv:2308.10248):

    add          x' = x + s * v
    norm_match   x' = x + s * |x| * u

Every quantity on the right is taken before any op of this layer, so ops add up in any order.
"""

from __future__ import annotations

import torch

from worker.steering.plan import LayerSteer, Rows, StepPlan


def apply_layer(
    plan: StepPlan,
    layer: int,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    table: torch.Tensor,
) -> None:
    """Steer and capture after `layer`; hidden and residual are [rows, width], changed in place.

    `table` is the vector bank's, float32 [places, width].
    """
    work = plan.steer[layer]
    if work is not None:
        _steer(work, hidden, residual, table, plan.unfit)
    for rows, out in plan.capture[layer]:
        if residual is None:
            out.copy_(_pick(hidden, rows))
        else:
            torch.add(_pick(hidden, rows), _pick(residual, rows), out=out)


def _pick(source: torch.Tensor, rows: Rows) -> torch.Tensor:
    return source[rows] if isinstance(rows, slice) else source.index_select(0, rows)


def _steer(
    work: LayerSteer,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    table: torch.Tensor,
    unfit: torch.Tensor,
) -> None:
    rows = work.rows
    h = _pick(hidden, rows)
    r = None if residual is None else _pick(residual, rows)
    x = h.to(torch.float32, copy=True) if r is None else h.float().add(r)
    delta = work.delta
    if delta is None:
        delta = table.index_select(0, work.place).mul_(work.scale)
    if work.norm is not None:
        delta = delta * _norm_factor(work.norm, work.owner, x)
    if work.owner is None:
        x.add_(delta)
    else:
        x.index_add_(0, work.owner, delta)
    # Comparison with NaN is false: a row is fit when its largest magnitude fits the dtype.
    peak = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True)
    fit = peak <= torch.finfo(hidden.dtype).max
    if r is None:
        _write(hidden, rows, torch.where(fit, x, h))
    else:
        _write(residual, rows, torch.where(fit, x, r))
        _write(hidden, rows, h.masked_fill(fit, 0))
    misfit = ~fit.squeeze(1)
    if isinstance(rows, slice):
        unfit[rows] |= misfit
    else:
        unfit.index_put_((rows,), misfit | unfit.index_select(0, rows))


def _norm_factor(
    matches: torch.Tensor, owner: torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor:
    """|x| [entries, 1] where the op matches norms, 1 elsewhere."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64).float()
    if owner is not None:
        norms = norms.index_select(0, owner)
    return torch.where(matches, norms, norms.new_ones(()))


def _write(target: torch.Tensor | None, rows: Rows, value: torch.Tensor) -> None:
    assert target is not None
    if isinstance(rows, slice):
        target[rows] = value
    else:
        target.index_copy_(0, rows, value.to(target.dtype))
