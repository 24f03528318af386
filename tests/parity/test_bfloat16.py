"""In bfloat16 a steer shows as exactly what was added, and nothing before it moves by a bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.models.families import FAMILIES
from tests.parity.asked import Asked, Edit, Read
from tests.parity.draws import Dice, sites_of
from tests.parity.running import run
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Outcome, Succeeded

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "engine",
    [pytest.param((name, "bfloat16"), id=name) for name in ("llama", "gemma3", "gpt2", "olmo2")],
    indirect=True,
)
def test_a_read_moves_by_what_was_added_within_a_bit_and_nothing_before_it_moves(
    engine: VllmEngine,
) -> None:
    family = FAMILIES[engine.facts.model]
    assert engine.facts.dtype == "bfloat16"
    for site in sites_of(family.name):
        dice = Dice(("bfloat16", family.name, site))
        width = family.z_width if site == "z" else family.width
        vector, scale = dice.matrix(1, width), 1.7
        plain = Asked(
            dice.prompt(30),
            1,
            reads=(
                Read("here", site, (1,)),
                Read("unsteered", site, (1,), before=True),
                Read("layer before", "resid_post", (0,)),
                Read("site before", site, (0,)),
            ),
        )
        edit = Edit("add", site, 1, vector, at={"spans": [[2, 28]]}, own={"scale": scale})
        (without,) = run(engine, [plain]).outcomes
        (steered,) = run(engine, [replace(plain, edits=(edit,))]).outcomes
        # A read before the op, the layer before, and the rows beside the span: bit by bit.
        for name in ("unsteered", "layer before", "site before"):
            assert (bits(steered, name) == bits(without, name)).all(), (site, name)
        here, was = bits(steered, "here"), bits(without, "here")
        assert (here[[0, 1, 28, 29]] == was[[0, 1, 28, 29]]).all(), site
        assert (here[2:28] != was[2:28]).any(axis=1).all()
        moved = floats(here[2:28]) - floats(was[2:28])
        larger = np.maximum(np.abs(floats(here[2:28])), np.abs(floats(was[2:28])))
        added = np.float64(scale) * vector[0].astype(np.float64)
        assert (np.abs(moved - added) <= last_place(larger)).all(), site


def bits(outcome: Outcome, name: str) -> np.ndarray:
    assert isinstance(outcome, Succeeded), outcome
    (capture,) = (capture for capture in outcome.captures if capture.name == name)
    assert capture.dtype == "bfloat16"
    (rows,) = capture.layers.values()
    assert rows.dtype == np.uint16
    return rows


def floats(rows: np.ndarray) -> np.ndarray:
    return (rows.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def last_place(values: np.ndarray) -> np.ndarray:
    """Return the distance of neighbouring bfloat16 numbers, which have 8 bits, at these sizes."""
    return np.exp2(np.floor(np.log2(np.maximum(values, 2.0**-126))) - 7)
