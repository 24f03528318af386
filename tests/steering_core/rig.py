"""A pretended engine around a real SteeringCore: scheduler, batch, tensors; and what must be so.

The scheduler does what vLLM's does: chunks of prompts, decoding, preemption with recompute from
the first position, requests that join, leave and are aborted, rows in any order, padding.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from app.steering.spec import Capture, Intervention, Op, Reduce, Site
from tests.steering_core.drawn import LONGEST, N_HEADS, N_LAYERS, Draw, Drawn
from tests.steering_core.naive import Row, reduced, steer_row
from worker.steering.bank import VectorBank
from worker.steering.board import Flag, StatusBoard, Tickets
from worker.steering.carrier import Carrier, Read, pack
from worker.steering.core import SteeringCore
from worker.steering.points import Shape
from worker.steering.region import CaptureRegion, region_shape

if TYPE_CHECKING:
    from pathlib import Path

Pair = tuple[torch.Tensor, torch.Tensor | None]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(slots=True)
class Guest:
    """A request on its way through the engine.

    By point: `base` holds what the model computes, hidden and residual, `ops` what acts there,
    `after` the rows as they were left last. `expected` are the flags that it must end with.
    """

    drawn: Drawn
    ticket: int
    regions: list[tuple[Capture, CaptureRegion]]
    base: dict[int, Pair]
    computed: int = 0
    furthest: int = 0
    lowest: int = LONGEST
    extra: bool = False
    steered: bool = True  # False once its plan failed
    expected: Flag = Flag.seen
    after: dict[int, torch.Tensor] = field(default_factory=dict)
    ops: dict[int, list[Intervention]] = field(default_factory=dict)
    points: set[int] = field(default_factory=set)


class BrokenProgramError(Exception):
    """Raised by a program that a test broke."""


class _BrokenProgram:
    """Stands for a program that cannot be planned."""

    keys = ()
    empty = False

    def cut(self, _start: int, _end: int) -> None:
        raise BrokenProgramError


class _WatchedBank(VectorBank):
    """A bank that knows whether it ever had to throw something out."""

    evicted = False

    def _evict(self, count: int) -> None:
        before = self.blocks
        super()._evict(count)
        self.evicted = self.evicted or self.blocks < before


class Rig:
    """One core, its board, and the requests inside."""

    def __init__(self, folder: Path, seed: int, dtype: torch.dtype, z_width: int) -> None:
        self.rng = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.folder = folder
        widths = {site: z_width if site is Site.z else 8 for site in Site}
        if self.rng.random() < 0.2:
            widths = {Site.resid_post: 8}
        self.pairs = {site for site in widths if self.rng.random() < 0.5}
        self.shape = Shape(N_LAYERS, widths, N_HEADS, dtype, torch.device("cpu"))
        self.draw = Draw(self.rng, widths)
        self.draw.fill()
        (folder / "vectors").mkdir()
        for name, rows in self.draw.vectors.items():
            np.save(folder / "vectors" / f"{name}.npy", rows)
        self.board = StatusBoard(folder / "board", create=True)
        self.tickets = Tickets(self.board)
        self.core = SteeringCore(shape=self.shape, board=self.board, vectors=folder / "vectors")
        self.batch: list[Guest | Drawn] = []  # a Drawn is a request that the core never hears of
        self.away: list[Guest] = []  # preempted
        self.plain: dict[str, int] = {}
        self.bank_may_be_full = False
        self.steps_reused = 0
        self.preemptions = 0

    def shrink_banks(self, rows: int) -> None:
        """Give the vectors of each width room for so many rows alone."""
        self.bank_may_be_full = True
        for width in {*self.shape.widths.values()}:
            for size in (width, width // N_HEADS):
                bank = _WatchedBank(size, rows, self.core._load, self.shape.device)
                self.core._banks._banks[size] = bank

    @property
    def evicted(self) -> bool:
        """Whether vectors had to leave a bank for others."""
        banks = self.core._banks._banks.values()
        return any(isinstance(bank, _WatchedBank) and bank.evicted for bank in banks)

    def join(self, name: str) -> None:
        """Let in a request, which is one that the core never hears of now and then."""
        if self.rng.random() < 0.15:
            self.batch.append(self.draw.request(name, plain=True))
            self.plain[name] = 0
        else:
            self.let_in(self.draw.request(name))

    def let_in(self, drawn: Drawn) -> Guest:
        """Hand a request to the core."""
        name = drawn.name
        guest = Guest(drawn, self.tickets.take(), [], self._tensors())
        dtype = str(self.dtype).removeprefix("torch.")
        for number, capture in enumerate(drawn.captures):
            rows = max(capture.rows(drawn.prompt + drawn.tokens), 1)
            shape = region_shape(capture, rows, self.shape.widths[capture.site], dtype)
            region = CaptureRegion.create(self.folder / f"{name}.{number}", shape)
            guest.regions.append((capture, region))
        reads = tuple(Read(c, str(r.path), r.shape.rows) for c, r in guest.regions)
        carried = pack(Carrier(guest.ticket, drawn.ops, reads))
        self._spoil(guest, carried)
        for op in drawn.ops:
            guest.ops.setdefault(self.shape.point(op.site, op.layer), []).append(op)
        guest.points = {*guest.ops} | {
            self.shape.point(capture.site, layer)
            for capture in drawn.captures
            for layer in capture.layers
        }
        guest.after = {point: torch.zeros_like(pair[0]) for point, pair in guest.base.items()}
        self.core.admit(name, json.loads(json.dumps(carried)))
        flags = self.tickets.flags(guest.ticket)
        if self.bank_may_be_full and Flag.plan_failed in flags and guest.steered:
            guest.expected |= Flag.plan_failed
            guest.steered = False
        guest.computed = guest.lowest = drawn.cached
        self.batch.append(guest)
        return guest

    def _spoil(self, guest: Guest, carried: dict[str, Any]) -> None:
        """Make a request bad before it comes in, when that is its defect."""
        drawn = guest.drawn
        if drawn.defect == "unknown":
            lost = drawn.ops[0].vector
            carried["shared"] = ["sv_lost" if v == lost else v for v in carried["shared"]]
            if any(op.vector == lost and not op.changes_nothing for op in drawn.ops):
                guest.expected |= Flag.unknown_vector
                guest.steered = False
        elif drawn.defect == "row":
            bad = Intervention(Op.add, Site.resid_post, 0, "sv_8_0", row=10**6)
            carried.update(pack(Carrier(guest.ticket, (*drawn.ops, bad))))
            guest.expected |= Flag.plan_failed
            guest.steered = False

    def _tensors(self) -> dict[int, Pair]:
        """Make what the model computes for a request at every point, steered or not."""
        base = {}
        for site, width in self.shape.widths.items():
            made = torch.randn((2, N_LAYERS, LONGEST + 1, width), generator=self.numbers)
            made = made.to(self.dtype)
            for layer in range(N_LAYERS):
                residual = made[1, layer] if site in self.pairs else None
                base[self.shape.point(site, layer)] = (made[0, layer], residual)
        return base

    def step(self) -> None:
        """Run one step of the engine."""
        rng = self.rng
        if rng.random() < 0.15:
            rng.shuffle(self.batch)
        counts, starts = [], []
        budget = rng.choice([3, 12, 64])
        for item in self.batch:
            count = min(self._wants(item), max(budget, 0)) if rng.random() < 0.95 else 0
            budget -= count
            counts.append(count)
            starts.append(item.computed if isinstance(item, Guest) else self.plain[item.name])
        names = [item.drawn.name if isinstance(item, Guest) else item.name for item in self.batch]
        if not sum(counts):
            return
        before = self.core._plan
        self.core.prepare(names, np.array(counts, np.int32), np.array(starts, np.int32))
        self.steps_reused += before is not None and before is self.core._plan
        self._forward(counts, starts)
        self.core.finish()
        self._check_outputs(counts)
        for item, count in zip(self.batch, counts, strict=True):
            if isinstance(item, Drawn):
                self.plain[item.name] += count
            elif count:
                item.lowest = min(item.lowest, item.computed)
                item.computed += count
                item.furthest = max(item.furthest, item.computed)

    def _wants(self, item: Guest | Drawn) -> int:
        """Say how many rows a request could run now."""
        if isinstance(item, Drawn):
            done = self.plain[item.name]
            return item.prompt - done if done < item.prompt else 1
        known = max(item.drawn.prompt, item.furthest)
        if item.computed < known:
            return known - item.computed
        return 1

    def _check_outputs(self, counts: list[int]) -> None:
        last = torch.zeros((len(self.batch), 4), dtype=self.dtype)
        for index, item in enumerate(self.batch):
            if isinstance(item, Drawn) or item.drawn.defect == "logits":
                last[index] = torch.nan
                if isinstance(item, Guest) and counts[index]:
                    item.expected |= Flag.non_finite
        self.core.check_outputs(last)

    def _forward(self, counts: list[int], starts: list[int]) -> None:
        points = self._points()
        padding = self.rng.choice([0, 0, 3])
        for point in points:
            width = self.shape.width_at(point)
            parts: list[tuple[torch.Tensor, torch.Tensor]] = []
            paired = tuple(Site)[point // N_LAYERS] in self.pairs
            for item, count, start in zip(self.batch, counts, starts, strict=True):
                if isinstance(item, Guest):
                    hidden, residual = item.base[point]
                    span = slice(start, start + count)
                    parts.append((hidden[span], residual[span] if paired else hidden[span]))
                else:
                    rows = torch.full((count, width), -0.0, dtype=self.dtype)
                    parts.append((rows, rows))
            pad = torch.full((padding, width), torch.nan, dtype=self.dtype)
            hidden = torch.cat([part[0] for part in parts] + [pad])
            residual = torch.cat([part[1] for part in parts] + [pad]) if paired else None
            came = (hidden.clone(), None if residual is None else residual.clone())
            as_given = hidden if residual is not None else hidden[None]
            self.core.work(point, as_given, residual)
            self._judge(point, (counts, starts), came, (hidden, residual))

    def _points(self) -> list[int]:
        """List, in the order of the pass, the points that matter now and some that do not."""
        guests = [item for item in self.batch if isinstance(item, Guest)]
        chosen = {point for guest in guests for point in guest.points}
        every = [
            self.shape.point(site, layer) for layer in range(N_LAYERS) for site in self.shape.widths
        ]
        chosen.update(self.rng.sample(every, 3))
        return [point for point in every if point in chosen]

    def _judge(
        self,
        point: int,
        ran: tuple[list[int], list[int]],
        came: tuple[torch.Tensor, torch.Tensor | None],
        left: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Compare every row of a point with the naive one."""
        stream = came[0].double() if came[1] is None else came[0].double() + came[1].double()
        got = left[0] if left[1] is None else torch.add(left[0], left[1])
        row = 0
        for item, count, start in zip(self.batch, *ran, strict=True):
            rows = slice(row, row + count)
            row += count
            if isinstance(item, Guest) and count:
                item.after[point][start : start + count] = got[rows]
                if item.steered and point in item.ops:
                    for place in range(count):
                        before, now = _cut(came, rows.start + place), _cut(left, rows.start + place)
                        x = stream[rows.start + place].numpy()
                        self._judge_row(item, point, start + place, (x, before, now))
                    continue
            assert _same_bits(_cut(came, rows), _cut(left, rows)), "a row was touched for nothing"
        tail = slice(row, None)
        assert _same_bits(_cut(came, tail), _cut(left, tail)), "a padding row was touched"

    def _judge_row(
        self, guest: Guest, point: int, position: int, seen: tuple[np.ndarray, Pair, Pair]
    ) -> None:
        """Compare one row that ops of its request may have changed."""
        x, came, left = seen
        want = steer_row(x, guest.ops[point], position, self.draw.vectors, N_HEADS)
        site, layer = tuple(Site)[point // N_LAYERS], point % N_LAYERS
        where = f"{guest.drawn.name} at {site.value} {layer}, position {position}"
        same = _same_bits(came, left)
        if not want.is_finite or np.abs(want.x).max() > torch.finfo(self.dtype).max:
            guest.expected |= Flag.non_finite
            assert same, f"{where}: a misfit was not left alone"
        elif not want.moved and not want.close:
            assert same, f"{where}: an untouched row was changed"
        elif want.moved or not same:
            _assert_near(guest.after[point][position], want, self.dtype, where)
            if left[1] is not None and not same:
                assert not left[0].any(), f"{where}: hidden is not zero"

    def leave(self, guest: Guest) -> None:
        """End a request that ran to its end, and judge it."""
        self.batch.remove(guest)
        flags = self.tickets.flags(guest.ticket)
        assert flags == guest.expected, (guest.drawn.name, flags, guest.expected)
        assert self.tickets.span(guest.ticket) == (guest.lowest, guest.furthest)
        rows = guest.drawn.prompt + guest.drawn.tokens - 1
        if guest.steered:
            for capture, region in guest.regions:
                self._judge_region(guest, capture, region, rows)
        self.core.dismiss([guest.drawn.name])
        self.tickets.give_back(guest.ticket)

    def _judge_region(
        self, guest: Guest, capture: Capture, region: CaptureRegion, ran: int
    ) -> None:
        positions = [position for position in range(ran) if capture.reads(position)]
        count = capture.rows(ran)
        assert count == len(positions)
        assert region.complete(count), f"{guest.drawn.name} {capture.name} misses rows"
        for place, layer in enumerate(capture.layers):
            point = self.shape.point(capture.site, layer)
            want = []
            for position in positions:
                hidden, residual = guest.base[point]
                came = hidden[position]
                if residual is not None:
                    came = torch.add(came, residual[position])
                want.append(came if capture.before else guest.after[point][position])
            if not want:
                continue
            stacked = torch.stack(want)
            got = region.data[place, :count]
            if capture.reduce in (Reduce.none, Reduce.mean):
                raw = (
                    stacked.numpy()
                    if self.dtype is torch.float32
                    else (stacked.view(torch.uint16).numpy())
                )
                np.testing.assert_array_equal(raw, got)
            else:
                numbers = reduced(stacked.double().numpy(), capture, self.draw.vectors)
                np.testing.assert_allclose(got, numbers, rtol=1e-5, atol=1e-5)

    def preempt(self, guest: Guest) -> None:
        """Throw a request out of the batch; it will start again from its first position."""
        self.batch.remove(guest)
        guest.computed = 0
        self.away.append(guest)
        self.preemptions += 1

    def resume(self) -> None:
        """Let preempted requests back in."""
        self.batch += self.away
        self.away = []

    def abort(self, guest: Guest) -> None:
        """Take a request out in the middle."""
        self.batch.remove(guest)
        self.core.dismiss([guest.drawn.name])
        self.tickets.give_back(guest.ticket)

    def break_down(self, guest: Guest) -> None:
        """Let the defect of a request happen while it runs and has rows left to run."""
        if guest.computed > guest.drawn.last:
            return
        tenant = self.core._tenants[guest.drawn.name]
        if guest.drawn.defect == "closed" and tenant.reads:
            tenant.reads[0].region.close()
            self.core._flag(tenant, Flag.plan_failed)
        elif guest.drawn.defect == "broken" and tenant.program is not None:
            tenant.program = _BrokenProgram()  # type: ignore[assignment]
            self.core._plan = None
        else:
            return
        guest.expected |= Flag.plan_failed
        guest.steered = False
        guest.drawn.defect = None


def _cut(pair: Pair, rows: slice | int) -> Pair:
    return pair[0][rows], None if pair[1] is None else pair[1][rows]


def _same_bits(one: Pair, other: Pair) -> bool:
    for left, right in zip(one, other, strict=True):
        if left is None:
            continue
        bits = BITS[left.dtype]
        if not torch.equal(left.view(bits), right.view(bits)):
            return False
    return True


def _assert_near(got: torch.Tensor, want: Row, dtype: torch.dtype, where: str) -> None:
    error = np.abs(got.double().numpy() - want.x)
    allowed = 1e-5 * max(want.size, 1e-30) + np.zeros_like(error)
    if dtype is not torch.float32:
        allowed += np.abs(want.x) * torch.finfo(dtype).eps * 0.5001 + 1e-7
    assert (error <= allowed).all(), f"{where}: {error.max()} over {allowed.min()}"
