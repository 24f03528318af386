"""SteeringCore, driven through random steps of random requests, against the naive rows.

Rows agree to 1e-5 in float32 and to one rounding in half precision; rows that nothing acts on are
equal bit for bit; every region is complete and holds the rows that were left; a request that goes
wrong is flagged alone.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import worker.steering.bank
from tests.steering_core.drawn import Drawn
from tests.steering_core.rig import Guest, Rig

EXAMPLES = int(os.environ.get("TILLER_CORE_EXAMPLES", "300"))


def run_story(rig: Rig, requests: int) -> None:
    """Let requests come, run, be preempted, be aborted and leave until none is left."""
    rng, waiting = rig.rng, [f"r{index}" for index in range(requests)]
    for _ in range(2000):
        while waiting and len(rig.batch) < 8 and rng.random() < 0.5:
            rig.join(waiting.pop())
        if rig.away and rng.random() < 0.3:
            rig.resume()
        guests = [item for item in rig.batch if isinstance(item, Guest)]
        if guests and rng.random() < 0.05:
            rig.preempt(rng.choice(guests))
        elif guests and rng.random() < 0.02:
            rig.abort(rng.choice(guests))
        elif guests and rng.random() < 0.1:
            rig.break_down(rng.choice(guests))
        rig.step()
        _let_go(rig)
        if not (rig.batch or rig.away or waiting):
            break
    else:
        raise AssertionError("the story has no end")
    assert rig.core.tenants == 0


def _let_go(rig: Rig) -> None:
    for item in list(rig.batch):
        if not isinstance(item, Guest):
            if rig.plain[item.name] > item.last:
                rig.batch.remove(item)
        elif item.computed > item.drawn.last:
            # An engine that schedules ahead runs the last sampled token, too.
            if not item.extra and rig.rng.random() < 0.2:
                item.extra = True
            else:
                rig.leave(item)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    z_width=st.sampled_from([8, 12]),
    requests=st.integers(1, 12),
    bank=st.sampled_from(["as it is", "growing", "full"]),
)
def test_every_row_and_region_is_that_of_the_naive_core(
    seed: int, dtype: torch.dtype, z_width: int, requests: int, bank: str
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if bank != "as it is":
            patch.setattr(worker.steering.bank, "_FIRST_ROWS", 2)
        rig = Rig(Path(folder), seed, dtype, z_width)
        if bank == "full":
            rig.shrink_banks(60)
        run_story(rig, requests)


@pytest.mark.parametrize("seed", range(12))
def test_an_op_in_a_hundred_pieces_acts_like_a_whole_one(tmp_path: Path, seed: int) -> None:
    rig = Rig(tmp_path, seed, torch.float32, 12)
    guest = rig.let_in(Drawn("pieces", prompt=20, tokens=3, ops=rig.draw.pieces(200)))
    while guest.computed <= guest.drawn.last:
        rig.step()
    rig.leave(guest)


def test_stories_reuse_plans_preempt_and_evict(tmp_path: Path) -> None:
    reused = preempted = evicted = 0
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        rig = Rig(folder, seed, torch.float32, 8)
        rig.shrink_banks(60)
        run_story(rig, 10)
        reused += rig.steps_reused
        preempted += rig.preemptions
        evicted += rig.evicted
    assert reused > 20
    assert preempted > 5
    assert evicted
