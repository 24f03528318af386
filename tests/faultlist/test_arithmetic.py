"""Every op is its formula, every site is where it is said to be, every reduction is its sum.

Rows before and after an op are captured in one request and compared with the formula in float64.
Sites are compared with each other: what is added to the stream is the difference of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from app.steering.spec import (
    FOREVER,
    Capture,
    Direction,
    Intervention,
    Op,
    Reduce,
    Site,
)
from tests.engine.engines import run_alone
from tests.faultlist.asking import (
    LAST,
    N_LAYERS,
    Floats,
    add,
    numbers_of,
    prompt_of,
    request,
    rows_of,
    succeeded,
    vector,
)
from worker.engine.vllm_engine import VllmEngine

P, M = 6, 4
RAN = P + M - 1
HEADS, HEAD = 4, 32  # z is 128 wide, the model 64
LAYER = 1
EXACT = 2e-5  # of float32 rows of size 1 to 30
Rows = np.ndarray


def unit(row: Rows) -> Rows:
    return row / np.linalg.norm(row)


def scored(x: Rows, v: Rows) -> Rows:
    return (x @ unit(v))[:, None]


FORMULAS: dict[str, tuple[dict[str, object], Callable[[Rows, Rows], Rows]]] = {
    "add": ({"scale": -1.5}, lambda x, v: x - 1.5 * v),
    "norm_match": (
        {"scale": 0.5, "norm_match": True},
        lambda x, v: x + 0.5 * np.linalg.norm(x, axis=1, keepdims=True) * unit(v),
    ),
    "ablate": ({"op": Op.orthogonal, "coeff": 0.0}, lambda x, v: x - scored(x, v) * unit(v)),
    "triple": ({"op": Op.orthogonal, "coeff": 3.0}, lambda x, v: x + 2 * scored(x, v) * unit(v)),
    "cap": (
        {"op": Op.cap, "low": -0.5, "high": 0.25},
        lambda x, v: x + (np.clip(scored(x, v), -0.5, 0.25) - scored(x, v)) * unit(v),
    ),
    "floor": (
        {"op": Op.cap, "low": 1.0},
        lambda x, v: x + (np.maximum(scored(x, v), 1.0) - scored(x, v)) * unit(v),
    ),
    "replace": ({"op": Op.replace}, lambda x, v: np.broadcast_to(v, x.shape)),
}


@pytest.mark.parametrize("site", list(Site))
@pytest.mark.parametrize("name", FORMULAS)
def test_an_op_is_its_formula(engine: VllmEngine, name: str, site: Site) -> None:
    fields, formula = FORMULAS[name]
    stored = drawn(engine, site)
    op = replace(add(stored, layer=LAYER, site=site), **fields)  # type: ignore[arg-type]
    before, after = before_and_after(engine, op)
    expected = formula(before, numbers_of(engine, stored)[0].astype(np.float64))
    assert np.abs(expected - before).max() > 0.1
    assert np.allclose(after, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", FORMULAS)
def test_an_op_on_heads_is_its_formula_on_their_slices_alone(engine: VllmEngine, name: str) -> None:
    fields, formula = FORMULAS[name]
    stored = drawn(engine, Site.z)
    op = add(stored, layer=LAYER, site=Site.z, heads=(1, 3))
    op = replace(op, **fields)  # type: ignore[arg-type]
    before, after = before_and_after(engine, op)
    v = numbers_of(engine, stored)[0].astype(np.float64)
    for head in range(HEADS):
        slice_ = slice(head * HEAD, (head + 1) * HEAD)
        if head in (1, 3):
            expected = formula(before[:, slice_], v[slice_])
            assert np.allclose(after[:, slice_], expected, rtol=EXACT, atol=EXACT)
        else:
            assert np.array_equal(after[:, slice_], before[:, slice_])


def test_each_position_is_replaced_by_its_own_row(engine: VllmEngine) -> None:
    stored = vector(engine, rows=3)
    places = (P, 0, 3)
    op = replace(add(stored, layer=LAYER), op=Op.replace, positions=places)
    before, after = before_and_after(engine, op)
    assert np.allclose(after[list(places)], numbers_of(engine, stored), atol=EXACT)
    others = [row for row in range(RAN) if row not in places]
    assert np.array_equal(after[others], before[others])


def test_steering_vectors_measure_the_row_before_any_of_them(engine: VllmEngine) -> None:
    first, second = (vector(engine, seed=seed) for seed in (1, 2))
    ops = [
        add(first, layer=LAYER, summed=True),
        add(second, layer=LAYER, summed=True, norm_match=True, scale=0.5),
    ]
    v, w = (numbers_of(engine, name)[0].astype(np.float64) for name in (first, second))
    before, after = before_and_after(engine, *ops)
    norms = np.linalg.norm(before, axis=1, keepdims=True)
    assert np.allclose(after, before + v + 0.5 * norms * unit(w), rtol=EXACT, atol=EXACT)
    # As interventions the second measures what the first left.
    before, after = before_and_after(engine, *(replace(op, summed=False) for op in ops))
    norms = np.linalg.norm(before + v, axis=1, keepdims=True)
    assert np.allclose(after, before + v + 0.5 * norms * unit(w), rtol=EXACT, atol=EXACT)


def test_every_site_is_where_it_is_said_to_be(engine: VllmEngine, tiny_llama: Path) -> None:
    layers = tuple(range(N_LAYERS))
    captures = tuple(Capture(site.value, site, layers) for site in Site)
    # Steered everywhere, so that hidden and residual are not what an unsteered pass leaves.
    ops = [add(vector(engine, seed=layer), layer=layer) for layer in layers]
    outcome = succeeded(run_alone(engine, request(prompt_of(P), *ops, captures=captures)))
    rows = {
        (capture.name, layer): np.array(values, dtype=np.float64)
        for capture in outcome.captures
        for layer, values in capture.layers.items()
    }
    weights = load_file(tiny_llama / "model.safetensors")
    close = {"rtol": EXACT, "atol": 10 * EXACT}
    for layer in layers:
        pre, mid = rows["resid_pre", layer], rows["resid_mid", layer]
        attention, mlp, z = (rows[name, layer] for name in ("attn_out", "mlp_out", "z"))
        project = weights[f"model.layers.{layer}.self_attn.o_proj.weight"].astype(np.float64)
        assert np.allclose(mid, pre + attention, **close)
        assert np.allclose(z @ project.T, attention, **close)
        steer = numbers_of(engine, ops[layer].vector)
        assert np.allclose(rows["resid_post", layer], mid + mlp + steer, **close)
        if layer:
            assert np.array_equal(pre, rows["resid_post", layer - 1])
    # Two sites of one name would pass the sums above if both were zero.
    assert all(np.abs(values).max() > 0.01 for values in rows.values())


def test_reductions_are_made_of_the_rows(engine: VllmEngine) -> None:
    directions = vector(engine, rows=3)
    span = ((2, 4), (5, FOREVER))
    plain = Capture("rows", Site.resid_post, (0, LAST))
    named = tuple(Direction(directions, row) for row in (2, 0, 1))
    captures = (
        plain,
        replace(plain, name="mean", reduce=Reduce.mean, spans=span),
        replace(plain, name="norm", reduce=Reduce.norm),
        replace(plain, name="unit", reduce=Reduce.project, directions=named, unit=True),
        replace(plain, name="dot", reduce=Reduce.project, directions=named, spans=span),
    )
    outcome = run_alone(engine, request(prompt_of(P), captures=captures, max_tokens=M))
    d = numbers_of(engine, directions)[[2, 0, 1]].astype(np.float64)
    chosen = [2, 3, *range(5, RAN)]
    for layer in (0, LAST):
        rows, mean, norm, scores, dots = (
            rows_of(outcome, layer, capture=index).astype(np.float64) for index in range(5)
        )
        assert mean.shape == (1, rows.shape[1])
        assert np.allclose(mean[0], rows[chosen].mean(axis=0), rtol=EXACT, atol=EXACT)
        assert np.allclose(norm[:, 0], np.linalg.norm(rows, axis=1), rtol=EXACT)
        lengths = np.linalg.norm(d, axis=1)
        assert np.allclose(scores, rows @ d.T / lengths, rtol=EXACT, atol=EXACT)
        assert np.allclose(dots, rows[chosen] @ d.T, rtol=EXACT, atol=10 * EXACT)
    positions = succeeded(outcome).captures[4].positions
    assert positions.tolist() == chosen


def drawn(engine: VllmEngine, site: Site) -> str:
    """Store a vector as wide as the site."""
    width = HEADS * HEAD if site is Site.z else 64
    numbers = np.random.default_rng(width).normal(size=width).astype(np.float32)
    engine.vectors.put(f"sv_wide_{width}", numbers)
    return f"sv_wide_{width}"


def before_and_after(engine: VllmEngine, *ops: Intervention) -> tuple[Floats, Floats]:
    """Run ops of one site and layer; return its rows before and after them."""
    site, layer = ops[0].site, ops[0].layer
    captures = (Capture("before", site, (layer,), before=True), Capture("after", site, (layer,)))
    outcome = run_alone(engine, request(prompt_of(P), *ops, captures=captures, max_tokens=M))
    return tuple(  # type: ignore[return-value]
        rows_of(outcome, layer, capture=index).astype(np.float64) for index in range(2)
    )
