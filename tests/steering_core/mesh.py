"""A small transformer over pipeline and tensor ranks, each with a steering core of its own.

However many ranks there are, the arithmetic is the same: what a tensor rank adds to the stream is
a partial sum of its head and its half of the MLP, and the sum is taken in the same order. So the
rows of a mesh of one rank are those of any other, bit for bit, when the cores do the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from app.steering.spec import Capture, Site
from tests.steering_core.drawn import N_HEADS, N_LAYERS, Drawn
from worker.steering.board import StatusBoard, Tickets
from worker.steering.carrier import Carrier, Read, pack
from worker.steering.core import SteeringCore
from worker.steering.points import Shape
from worker.steering.region import CaptureRegion, region_shape

WIDTH, Z_WIDTH, VOCAB = 8, 12, 50
_INNER, _HEAD = 16, Z_WIDTH // N_HEADS


@dataclass(slots=True)
class Guest:
    """A request on its way: the tokens known so far, and how many positions have run."""

    drawn: Drawn
    tokens: list[int]
    computed: int = 0


@dataclass(slots=True)
class _Stay:
    ticket: int
    regions: list[tuple[Capture, CaptureRegion]]
    keys: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    values: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


class Weights:
    """The numbers of the model, the same for every mesh of a seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        made = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=made) * 0.5).to(dtype)

        self.tokens = draw(VOCAB, WIDTH)
        self.logits = draw(WIDTH, VOCAB)
        self.query, self.key, self.value = (draw(N_LAYERS, N_HEADS, WIDTH, _HEAD) for _ in "qkv")
        self.out = draw(N_LAYERS, N_HEADS, _HEAD, WIDTH)
        self.up = draw(N_LAYERS, 2, WIDTH, _INNER // 2)
        self.down = draw(N_LAYERS, 2, _INNER // 2, WIDTH)


class Mesh:
    """Cores of `stages` x `tensor` ranks around one model; several layers make a stage."""

    def __init__(
        self,
        folder: Path,
        weights: Weights,
        vectors: Mapping[str, np.ndarray],
        *,
        stages: Sequence[range] = (range(N_LAYERS),),
        tensor: int = 1,
    ) -> None:
        folder.mkdir()
        (folder / "vectors").mkdir()
        for name, rows in vectors.items():
            np.save(folder / "vectors" / f"{name}.npy", rows)
        self.folder = folder
        self.weights = weights
        self.dtype = weights.tokens.dtype
        self.stages = stages
        self.widths = {site: WIDTH for site in Site if site is not Site.z}
        if tensor == 1:
            self.widths[Site.z] = Z_WIDTH
        self.board = StatusBoard(folder / "board", ranks=len(stages) * tensor, create=True)
        self.tickets = Tickets(self.board)
        self.cores = [
            [
                SteeringCore(
                    shape=Shape(N_LAYERS, self.widths, N_HEADS, self.dtype, _CPU, here=layers),
                    board=self.board,
                    vectors=folder / "vectors",
                    rank=number * tensor + place,
                    captures=place == 0,
                )
                for place in range(tensor)
            ]
            for number, layers in enumerate(stages)
        ]
        self.stays: dict[str, _Stay] = {}

    def let_in(self, drawn: Drawn) -> None:
        """Hand a request to every rank."""
        stay = _Stay(self.tickets.take(), [])
        for number, capture in enumerate(drawn.captures):
            rows = max(capture.rows(drawn.prompt + drawn.tokens), 1)
            width = self.widths.get(capture.site, Z_WIDTH)
            shape = region_shape(capture, rows, width, str(self.dtype).removeprefix("torch."))
            region = CaptureRegion.create(self.folder / f"{drawn.name}.{number}", shape)
            stay.regions.append((capture, region))
        reads = tuple(Read(c, str(r.path), r.shape.rows) for c, r in stay.regions)
        carried = pack(Carrier(stay.ticket, drawn.ops, reads))
        self.stays[drawn.name] = stay
        for stage in self.cores:
            for core in stage:
                core.admit(drawn.name, json.loads(json.dumps(carried)))

    def forget_keys(self, name: str) -> None:
        """Drop what attention kept of a request, as preemption does."""
        self.stays[name].keys.clear()
        self.stays[name].values.clear()

    def leave(self, name: str) -> None:
        """End a request on every rank."""
        for stage in self.cores:
            for core in stage:
                core.dismiss([name])
        self.tickets.give_back(self.stays.pop(name).ticket)

    def close(self) -> None:
        """Let go of every request that is still in."""
        for stage in self.cores:
            for core in stage:
                core.close()

    def step(self, batch: Sequence[Guest], counts: Sequence[int]) -> torch.Tensor:
        """Run a step; return the rows of the stream after the last layer."""
        names = [guest.drawn.name for guest in batch]
        starts = [guest.computed for guest in batch]
        ids = [
            token
            for guest, count in zip(batch, counts, strict=True)
            for token in guest.tokens[guest.computed : guest.computed + count]
        ]
        hidden = self.weights.tokens[ids]
        residual = torch.zeros_like(hidden)
        for stage, layers in zip(self.cores, self.stages, strict=True):
            for core in stage:
                core.prepare(names, np.array(counts, np.int32), np.array(starts, np.int32))
            # Between stages the pair travels as it is: a rank's memory is its own.
            states = [(hidden.clone(), residual.clone()) for _ in stage]
            for layer in layers:
                states = self._layer(stage, layer, states, (names, counts))
            for core in stage:
                core.finish()
            hidden, residual = states[0]
            for other in states[1:]:
                assert all(map(torch.equal, states[0], other)), "tensor ranks drift apart"
        return hidden + residual

    def _layer(
        self,
        cores: list[SteeringCore],
        layer: int,
        states: list[tuple[torch.Tensor, torch.Tensor]],
        batch: tuple[Sequence[str], Sequence[int]],
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run one layer on the ranks of a stage, whose sums are the same on all of them."""
        weights = self.weights

        def work(site: Site, hidden: Sequence[torch.Tensor], *pair: Sequence[torch.Tensor]) -> None:
            for place, core in enumerate(cores):
                point = core.shape.point(site, layer)
                core.work(point, hidden[place], *(other[place] for other in pair))

        hidden, residual = (list(tensors) for tensors in zip(*states, strict=True))
        work(Site.resid_pre, hidden, residual)
        residual = [h + r for h, r in zip(hidden, residual, strict=True)]
        normed = [_normed(x) for x in residual]
        z = [self._head(layer, head, normed[head % len(cores)], batch) for head in range(N_HEADS)]
        if len(cores) == 1:
            whole = torch.cat(z, dim=1)
            work(Site.z, [whole])
            z = [part.contiguous() for part in whole.split(_HEAD, dim=1)]
        summed = z[0] @ weights.out[layer, 0] + z[1] @ weights.out[layer, 1]
        hidden = [summed.clone() for _ in cores]
        work(Site.attn_out, hidden)
        work(Site.resid_mid, hidden, residual)
        residual = [h + r for h, r in zip(hidden, residual, strict=True)]
        normed = [_normed(x) for x in residual]
        inner = [(normed[half % len(cores)] @ weights.up[layer, half]).relu() for half in range(2)]
        summed = inner[0] @ weights.down[layer, 0] + inner[1] @ weights.down[layer, 1]
        hidden = [summed.clone() for _ in cores]
        work(Site.mlp_out, hidden)
        work(Site.resid_post, hidden, residual)
        return list(zip(hidden, residual, strict=True))

    def _head(
        self, layer: int, head: int, x: torch.Tensor, batch: tuple[Sequence[str], Sequence[int]]
    ) -> torch.Tensor:
        """Attend with one head, each request over its own positions so far."""
        weights, where = self.weights, (layer, head)
        rows, row = [], 0
        for name, count in zip(*batch, strict=True):
            mine, row = x[row : row + count], row + count
            stay = self.stays[name]
            for kept, weight in ((stay.keys, weights.key), (stay.values, weights.value)):
                new = mine @ weight[where]
                kept[where] = torch.cat([kept[where], new]) if where in kept else new
            keys, values = stay.keys[where], stay.values[where]
            scores = (mine @ weights.query[where] @ keys.T).float()
            ahead = torch.arange(len(keys)) - torch.arange(len(keys) - count, len(keys))[:, None]
            scores.masked_fill_(ahead > 0, -torch.inf)
            rows.append(scores.softmax(dim=1).to(self.dtype) @ values)
        return torch.cat(rows)


_CPU = torch.device("cpu")


def _normed(x: torch.Tensor) -> torch.Tensor:
    return (x.float() / (x.float().square().mean(dim=1, keepdim=True) + 1e-5).sqrt()).to(x.dtype)


def guest_of(drawn: Drawn, rng: random.Random) -> Guest:
    """Give a request a prompt."""
    return Guest(drawn, [rng.randrange(VOCAB) for _ in range(drawn.prompt)])
