"""Cores of several ranks do together what one core does: rows, tokens, regions and flags.

No vLLM runs here: two and more ranks are cores of one process, each with the layers that are its
own, driven through the same steps as a single one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from app.steering.spec import Capture, Intervention, Op, Site
from tests.steering_core.drawn import N_HEADS, N_LAYERS, Draw, Drawn
from tests.steering_core.mesh import WIDTH, Z_WIDTH, Guest, Mesh, Weights, guest_of
from worker.steering.board import Flag

TWO, THREE = (range(5), range(5, 12)), (range(1), range(1, 8), range(8, 12))


class Story:
    """Requests that come, run in chunks, are preempted and leave, on several meshes at once."""

    def __init__(self, seed: int, draw: Draw, meshes: list[Mesh]) -> None:
        self.rng = random.Random(seed)
        self.draw = draw
        self.meshes = meshes
        self.batch: list[Guest] = []
        self.flags: Counter[Flag] = Counter()
        self.preempted = 0

    def run(self, requests: int) -> None:
        """Run that many random requests to their ends."""
        waiting = requests
        while waiting or self.batch:
            while waiting and len(self.batch) < 6 and self.rng.random() < 0.6:
                waiting -= 1
                self.join(self._drawn(f"r{waiting}"))
            if self.batch and self.rng.random() < 0.05:
                self._preempt(self.rng.choice(self.batch))
            self.step(self.rng.choice([3, 12, 64]))

    def join(self, drawn: Drawn) -> None:
        """Let one request in everywhere."""
        self.batch.append(guest_of(drawn, self.rng))
        for mesh in self.meshes:
            mesh.let_in(drawn)

    def _drawn(self, name: str) -> Drawn:
        drawn = self.draw.request(name)
        drawn.cached, drawn.defect = 0, None
        return drawn

    def _preempt(self, guest: Guest) -> None:
        guest.computed = 0
        self.preempted += 1
        for mesh in self.meshes:
            mesh.forget_keys(guest.drawn.name)

    def step(self, budget: int) -> None:
        """Run one step on every mesh, and compare the rows that come out."""
        chosen, counts = [], []
        for guest in self.batch:
            count = min(len(guest.tokens) - guest.computed, budget)
            budget -= count
            if count:
                chosen.append(guest)
                counts.append(count)
        if not chosen:
            return
        rows, *others = [mesh.step(chosen, counts) for mesh in self.meshes]
        for other in others:
            assert torch.equal(bits(rows), bits(other)), "rows differ from those of one rank"
        ends = np.cumsum(counts) - 1
        tokens = (rows[ends] @ self.meshes[0].weights.logits).argmax(dim=1).tolist()
        for guest, count, token in zip(chosen, counts, tokens, strict=True):
            guest.computed += count
            if guest.computed > guest.drawn.last:
                self._leave(guest)
            elif guest.computed == len(guest.tokens):
                guest.tokens.append(token)

    def _leave(self, guest: Guest) -> None:
        """Compare what is kept of a request, then let it go."""
        self.batch.remove(guest)
        name, first = guest.drawn.name, self.meshes[0]
        want = first.stays[name]
        flags = first.tickets.flags(want.ticket)
        self.flags[flags] += 1
        for mesh in self.meshes:
            stay = mesh.stays[name]
            assert mesh.tickets.flags(stay.ticket) == flags, name
            assert mesh.tickets.span(stay.ticket) == (0, guest.computed)
            for (capture, region), (_, wanted) in zip(stay.regions, want.regions, strict=True):
                count = capture.rows(guest.computed)
                assert region.complete(count), f"{name} {capture.name} misses rows"
                np.testing.assert_array_equal(region.written, wanted.written)
                np.testing.assert_array_equal(region.data[:, :count], wanted.data[:, :count])
            mesh.leave(name)
            assert all(name not in core._tenants for stage in mesh.cores for core in stage)


def bits(rows: torch.Tensor) -> torch.Tensor:
    """Show numbers as bits: the same NaN is the same."""
    return rows.view(torch.int32 if rows.dtype is torch.float32 else torch.int16)


def draw_for(seed: int, *, z: bool) -> Draw:
    """Make vectors and a source of requests for the model of `mesh`."""
    widths = {
        site: Z_WIDTH if site is Site.z else WIDTH for site in Site if z or site is not Site.z
    }
    draw = Draw(random.Random(seed), widths)
    draw.fill()
    return draw


def every_op(draw: Draw, site: Site) -> Drawn:
    """Make a request that does each op at a site in a layer of every stage, and reads them all."""
    layers, name = (0, 3, 6, 11), draw.by_width[draw.widths[site]][0]
    heads = (1,) if site is Site.z else None
    ops = [
        op
        for layer in layers
        for op in (
            Intervention(Op.add, site, layer, name, layer, scale=0.7, summed=True),
            Intervention(Op.add, site, layer, name, 1, scale=0.3, norm_match=True, heads=heads),
            Intervention(Op.orthogonal, site, layer, name, 2, coeff=0.5, spans=((0, 4),)),
            Intervention(Op.cap, site, layer, name, 3, low=-0.5, high=0.5, heads=heads),
            Intervention(Op.replace, site, layer, name, 4, positions=(1, 6)),
        )
    ]
    reads = tuple(
        Capture(f"read{before}", site, (2, *layers[1:]), before=before) for before in (True, False)
    )
    return Drawn(f"every-{site.value}", 5, 4, tuple(ops), reads)


def too_large(draw: Draw) -> Drawn:
    """Make a request whose op carries rows beyond every number format, in one stage."""
    name = draw.by_width[WIDTH][0]
    row = int(np.abs(draw.vectors[name]).max(axis=1).argmax())
    op = Intervention(Op.add, Site.resid_mid, 6, name, row, scale=3e38)
    return Drawn("too-large", 3, 3, (op,))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Rows this small gain nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_pipeline_ranks_do_what_one_rank_does(tmp_path: Path, dtype: torch.dtype) -> None:
    flags: Counter[Flag] = Counter()
    preempted = 0
    for seed in range(3):
        draw, weights, folder = draw_for(seed, z=True), Weights(seed, dtype), tmp_path / str(seed)
        folder.mkdir()
        meshes = [
            Mesh(folder / str(len(stages)), weights, draw.vectors, stages=stages)
            for stages in ((range(N_LAYERS),), TWO, THREE)
        ]
        story = Story(seed, draw, meshes)
        for site in Site:
            story.join(every_op(draw, site))
        story.join(too_large(draw))
        story.run(6)
        flags, preempted = flags + story.flags, preempted + story.preempted
    assert {*flags} == {Flag.seen, Flag.seen | Flag.non_finite}
    assert preempted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_tensor_ranks_do_what_one_rank_does_and_one_of_them_captures(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    for seed in range(2):
        draw, weights, folder = draw_for(seed, z=False), Weights(seed, dtype), tmp_path / str(seed)
        folder.mkdir()
        meshes = [
            Mesh(folder / "one", weights, draw.vectors),
            Mesh(folder / "tensor", weights, draw.vectors, tensor=2),
            Mesh(folder / "both", weights, draw.vectors, stages=TWO, tensor=2),
        ]
        story = Story(seed, draw, meshes)
        story.join(
            Drawn("reader", 3, 4, captures=(Capture("all", Site.attn_out, tuple(range(N_LAYERS))),))
        )
        for mesh in meshes[1:]:
            for stage in mesh.cores:
                assert [len(core._tenants["reader"].reads) for core in stage] == [1, 0]
        for site in draw.widths:
            story.join(every_op(draw, site))
        story.run(4)


def test_a_rank_keeps_ops_and_rows_of_its_own_layers_alone(tmp_path: Path) -> None:
    draw = draw_for(1, z=True)
    mesh = Mesh(tmp_path / "two", Weights(1, torch.float32), draw.vectors, stages=TWO)
    low = Intervention(Op.add, Site.resid_post, 2, "sv_8_0", 1)
    mesh.let_in(Drawn("low", 2, 2, (low,), (Capture("c", Site.resid_post, (2, 3)),)))
    first, second = (stage[0]._tenants["low"] for stage in mesh.cores)
    assert first.program is not None
    assert [read.layers for read in first.reads] == [(2, 3)]
    assert (second.program, second.reads) == (None, ())
    mesh.let_in(Drawn("across", 2, 2, captures=(Capture("c", Site.z, (0, 4, 5, 11)),)))
    reads = [stage[0]._tenants["across"].reads[0] for stage in mesh.cores]
    assert [(read.layers, read.place) for read in reads] == [((0, 4), 0), ((5, 11), 2)]
    mesh.close()


@pytest.mark.parametrize("layer", [2, 9])
def test_what_goes_wrong_on_one_rank_is_known_of_the_request(tmp_path: Path, layer: int) -> None:
    draw = draw_for(2, z=True)
    mesh = Mesh(tmp_path / "two", Weights(2, torch.float32), draw.vectors, stages=TWO)
    lost = Intervention(Op.add, Site.resid_post, layer, "sv_lost", 0)
    mesh.let_in(Drawn("lost", 2, 2, (lost,)))
    assert mesh.tickets.flags(mesh.stays["lost"].ticket) == Flag.seen | Flag.unknown_vector
    mesh.let_in(Drawn("fine", 2, 2))
    assert mesh.tickets.flags(mesh.stays["fine"].ticket) == Flag.seen


def test_a_layer_that_no_rank_has_is_an_error_on_all_of_them(tmp_path: Path) -> None:
    draw = draw_for(3, z=True)
    mesh = Mesh(tmp_path / "two", Weights(3, torch.float32), draw.vectors, stages=TWO)
    beyond = Intervention(Op.add, Site.resid_post, N_LAYERS, "sv_8_0", 0)
    mesh.let_in(Drawn("op", 2, 2, (beyond,)))
    mesh.let_in(Drawn("read", 2, 2, captures=(Capture("c", Site.mlp_out, (N_LAYERS,)),)))
    for name in ("op", "read"):
        assert (mesh.board.flags[:, mesh.stays[name].ticket] & Flag.plan_failed).all()


def test_heads_spread_over_tensor_ranks_are_refused_and_never_run_unsteered(tmp_path: Path) -> None:
    draw = draw_for(4, z=True)
    mesh = Mesh(tmp_path / "tensor", Weights(4, torch.float32), draw.vectors, tensor=2)
    name = draw.by_width[Z_WIDTH][0]
    whole = Intervention(Op.orthogonal, Site.z, 1, name, 0, coeff=0.0)
    slices = Intervention(Op.add, Site.z, 1, name, 0, heads=tuple(range(N_HEADS)))
    mesh.let_in(Drawn("whole", 2, 2, (whole,)))
    mesh.let_in(Drawn("heads", 2, 2, (slices,)))
    mesh.let_in(Drawn("read", 2, 2, captures=(Capture("c", Site.z, (1,)),)))
    for guest in ("whole", "heads", "read"):
        flags = mesh.tickets.flags(mesh.stays[guest].ticket)
        assert flags == Flag.seen | Flag.plan_failed, guest
