"""Random requests for the steering core: what they write, what they read, how long they are."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from app.steering.spec import FOREVER, Capture, Direction, Intervention, Op, Reduce, Site

if TYPE_CHECKING:
    from collections.abc import Mapping

N_LAYERS, N_HEADS = 12, 2
LONGEST = 24  # positions that a request may run
ROWS = 30  # of every stored vector


@dataclass(slots=True)
class Drawn:
    """A request: its positions 0..prompt + tokens - 2 run. `defect` says how it goes wrong."""

    name: str
    prompt: int
    tokens: int
    ops: tuple[Intervention, ...] = ()
    captures: tuple[Capture, ...] = ()
    cached: int = 0
    defect: str | None = None

    @property
    def last(self) -> int:
        return self.prompt + self.tokens - 2


@dataclass(slots=True)
class Draw:
    """Draws requests for a model with these widths; `vectors` by name, [ROWS, width]."""

    rng: random.Random
    widths: Mapping[Site, int]
    vectors: dict[str, np.ndarray] = field(default_factory=dict)
    by_width: dict[int, list[str]] = field(default_factory=dict)
    crowded: list[tuple[Site, int]] = field(default_factory=list)

    def fill(self) -> None:
        """Make the stored vectors; some rows are zero, and some slices of heads."""
        numbers = np.random.default_rng(self.rng.randrange(2**32))
        for width in sorted(set(self.widths.values())):
            for index in range(4):
                rows = numbers.normal(size=(ROWS, width)).astype(np.float32)
                rows[numbers.integers(ROWS, size=4)] = 0
                rows[numbers.integers(ROWS, size=4), : width // N_HEADS] = 0
                name = f"sv_{width}_{index}"
                self.vectors[name] = rows
                self.by_width.setdefault(width, []).append(name)
        sites = list(self.widths)
        self.crowded = [(self.rng.choice(sites), self.rng.randrange(N_LAYERS)) for _ in range(3)]
        if Site.z in self.widths:
            self.crowded.append((Site.z, 0))

    def request(self, name: str, *, plain: bool = False) -> Drawn:
        """Draw one request."""
        rng = self.rng
        prompt = rng.choice([1, 1, 2, rng.randrange(1, 16)])
        drawn = Drawn(name, prompt, rng.randrange(1, LONGEST - prompt))
        if plain:
            return drawn
        drawn.ops = tuple(self._op(drawn) for _ in range(rng.choice([0, 1, 2, 4, 10])))
        if rng.random() < 0.15:
            drawn.ops += self._everywhere()
        if rng.random() < 0.15:
            drawn.ops += self.pieces(drawn.last + 1)
        if rng.random() < 0.7:
            count = rng.choice([1, 1, 2, 4])
            drawn.captures = tuple(self._capture(f"c{i}", drawn) for i in range(count))
        elif rng.random() < 0.3:
            drawn.cached = rng.randrange(prompt)
        if not drawn.ops and not drawn.captures:
            drawn.ops = self._everywhere()
        self._spoil(drawn)
        return drawn

    def _spoil(self, drawn: Drawn) -> None:
        """Give one request in four a defect."""
        rng = self.rng
        chance = rng.random()
        if chance < 0.03 and drawn.ops:
            drawn.defect = "unknown"
        elif chance < 0.06:
            drawn.defect = "row"
        elif chance < 0.1 and drawn.captures:
            drawn.defect = "closed"
        elif chance < 0.14 and drawn.ops:
            drawn.defect = "broken"
        elif chance < 0.18:
            drawn.defect = "logits"
        elif chance < 0.24:
            drawn.ops += (self._overflowing(drawn),)

    def _everywhere(self) -> tuple[Intervention, ...]:
        """One Steering vector at every layer: what most requests bring."""
        site = self.rng.choice(list(self.widths))
        name = self.rng.choice(self.by_width[self.widths[site]])
        scale, norm_match = self.rng.choice([-1.0, 0.5, 2.0]), self.rng.random() < 0.3
        return tuple(
            Intervention(
                Op.add, site, layer, name, layer, scale=scale, norm_match=norm_match, summed=True
            )
            for layer in range(N_LAYERS)
        )

    def pieces(self, reach: int) -> tuple[Intervention, ...]:
        """One op with a vector for each position, cut into pieces by excluded positions."""
        rng = self.rng
        site, layer = rng.choice(self.crowded)
        op = rng.choice([Op.add, Op.orthogonal, Op.replace])
        whole = Intervention(
            *(op, site, layer, rng.choice(self.by_width[self.widths[site]]), 0),
            norm_match=op is Op.add and rng.random() < 0.5,
            coeff=0.0 if op is Op.orthogonal else None,
        )
        return tuple(
            replace(whole, row=position % ROWS, positions=(position,))
            for position in range(0, reach, 2)
        )

    def _overflowing(self, drawn: Drawn) -> Intervention:
        site = self.rng.choice(list(self.widths))
        name = self.rng.choice(self.by_width[self.widths[site]])
        row = next(i for i, row in enumerate(self.vectors[name]) if np.abs(row).max() > 1.5)
        return Intervention(
            *(Op.add, site, self.rng.randrange(N_LAYERS), name, row),
            scale=3e38,
            spans=self._spans(drawn),
        )

    def _op(self, drawn: Drawn) -> Intervention:
        rng = self.rng
        site, layer = rng.choice(list(self.widths)), rng.randrange(N_LAYERS)
        if rng.random() < 0.7:
            site, layer = rng.choice(self.crowded)
        op = rng.choice([Op.add, Op.add, *Op])
        summed = op is Op.add and rng.random() < 0.4
        positions, spans, row = None, None, rng.randrange(ROWS)
        form = rng.random()
        if form < 0.3:
            positions = self._positions(drawn, repeated=summed)
            row = rng.randrange(ROWS - len(positions) + 1)
        elif form < 0.65:
            spans = self._spans(drawn)
        heads = None
        if site is Site.z and not summed and rng.random() < 0.5:
            heads = tuple(sorted(rng.sample(range(N_HEADS), rng.randrange(1, N_HEADS + 1))))
        low, high = sorted(rng.uniform(-2, 2) for _ in range(2))
        open_side = rng.randrange(3)
        return Intervention(
            op=op,
            site=site,
            layer=layer,
            vector=rng.choice(self.by_width[self.widths[site]]),
            row=row,
            scale=rng.choice([0.0, -1.0, 0.3, 2.0, 7.0]) if op is Op.add else 1.0,
            norm_match=op is Op.add and rng.random() < 0.4,
            positions=positions,
            spans=spans,
            coeff=rng.choice([0.0, 0.0, 1.0, -1.0, 0.5]) if op is Op.orthogonal else None,
            low=low if op is Op.cap and open_side != 0 else None,
            high=high if op is Op.cap and open_side != 1 else None,
            heads=heads,
            summed=summed,
        )

    def _positions(self, drawn: Drawn, *, repeated: bool) -> tuple[int, ...]:
        reach = drawn.last + 1
        if repeated:
            return tuple(self.rng.randrange(reach) for _ in range(self.rng.randrange(1, 6)))
        return tuple(self.rng.sample(range(reach), self.rng.randrange(1, min(reach, 8) + 1)))

    def _spans(self, drawn: Drawn) -> tuple[tuple[int, int], ...]:
        """Draw spans; they may touch, lie past the end, or be open."""
        rng = self.rng
        edges = sorted(rng.sample(range(drawn.last + 4), min(drawn.last + 4, rng.choice([2, 4]))))
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        chance = rng.random()
        if chance < 0.2:
            spans = [(rng.randrange(drawn.last + 2), FOREVER)]
        elif chance < 0.3:
            spans = [(0, drawn.prompt), (drawn.prompt, FOREVER)]
        elif chance < 0.4:
            spans = [(drawn.prompt - 1, FOREVER)]
        return tuple(spans)

    def _capture(self, name: str, drawn: Drawn) -> Capture:
        rng = self.rng
        site = rng.choice(list(self.widths))
        layers = tuple(sorted(rng.sample(range(N_LAYERS), rng.choice([1, 1, 2, N_LAYERS]))))
        if rng.random() < 0.5:
            site, layer = rng.choice(self.crowded)
            layers = (layer,)
        reduce = rng.choice([Reduce.none, Reduce.none, Reduce.mean, Reduce.norm, Reduce.project])
        directions: tuple[Direction, ...] = ()
        if reduce is Reduce.project:
            names = self.by_width[self.widths[site]]
            directions = tuple(
                Direction(rng.choice(names), rng.randrange(ROWS)) for _ in range(rng.choice([1, 3]))
            )
        spans = self._spans(drawn) if rng.random() < 0.5 else None
        return Capture(
            name=name,
            site=site,
            layers=layers,
            spans=() if rng.random() < 0.05 else spans,
            before=rng.random() < 0.4,
            reduce=reduce,
            directions=directions,
            unit=bool(directions) and rng.random() < 0.5,
        )
