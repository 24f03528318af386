"""Seats of urgent requests come on top of a configuration that leaves no room for them."""

from __future__ import annotations

from pathlib import Path

from app.completions.spec import RequestSpec, Sampling
from tests.engine.engines import engine_for, run_together
from worker.outcomes import Succeeded

SEATS, URGENT_SEATS = 64, 8


def test_an_engine_starts_with_as_many_tokens_a_pass_as_seats(
    tiny_llama: Path, tmp_path: Path
) -> None:
    changes = {"max_num_seqs": SEATS, "urgent_seats": URGENT_SEATS, "max_num_batched_tokens": SEATS}
    spec = RequestSpec((5, 9, 17, 33), None, Sampling(max_tokens=3, ignore_eos=True))
    with engine_for(tiny_llama, tmp_path, **changes) as engine:
        outcomes = run_together(engine, [spec] * (SEATS + 1))
        assert all(isinstance(outcome, Succeeded) for outcome in outcomes)
        for outcome in outcomes:
            assert isinstance(outcome, Succeeded)
            outcome.release()
