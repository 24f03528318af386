"""What is said to change nothing changes no bit, on the very way of a steered request.

Bits depend on the shape of a batch, so each is compared with a plain request in its place. In
bfloat16 a row that is merely rounded again would show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.steering.spec import FOREVER, Op, Site
from tests.engine.engines import engine_for, run_together
from tests.faultlist.asking import N_LAYERS, WIDTH, add, prompt_of, request, rows_of, vector
from worker.engine.vllm_engine import VllmEngine

P, M = 6, 4
LAYER = 1
Z_WIDTH = 128


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    """An engine of each dtype, one after the other."""
    scratch = tmp_path_factory.mktemp("scratch")
    with engine_for(tiny_llama, scratch, dtype=request.param) as started:
        yield started


NOTHING = {
    "scale 0": {"scale": 0.0},
    "zeros": {"vector": "sv_zeros"},
    "zeros, matched": {"vector": "sv_zeros", "norm_match": True},
    "coeff 1": {"op": Op.orthogonal, "coeff": 1.0},
    "no direction to remove": {"op": Op.orthogonal, "coeff": 0.0, "vector": "sv_zeros"},
    "no direction to cap": {"op": Op.cap, "low": 1.0, "vector": "sv_zeros"},
    "inside the bounds": {"op": Op.cap, "low": -1e6, "high": 1e6},
    "beyond the text": {"spans": ((P + M - 1, FOREVER),)},
    "no head": {"site": Site.z, "heads": (), "vector": "sv_wide"},
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_is_said_to_change_nothing_changes_no_bit(engine: VllmEngine, name: str) -> None:
    engine.vectors.put("sv_zeros", np.zeros(WIDTH, dtype=np.float32))
    engine.vectors.put("sv_wide", np.ones(Z_WIDTH, dtype=np.float32))
    idle = replace(add(vector(engine), layer=LAYER), **NOTHING[name])  # type: ignore[arg-type]
    plain = request(prompt_of(P), max_tokens=M)
    (_, expected), (_, found) = (
        run_together(engine, [plain, other])
        for other in (plain, replace(plain, interventions=(idle,)))
    )
    for layer in range(N_LAYERS):
        assert np.array_equal(rows_of(found, layer), rows_of(expected, layer))
