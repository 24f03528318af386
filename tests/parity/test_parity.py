"""Op x site x form of `at` x family x condition against plain Hugging Face.

Without more, every pair of values is run, and every op, site and form together.
TILLER_PARITY=full runs the whole matrix, 20,448 combinations in about half an hour on two cores.
TILLER_PARITY_DRAWS sets how many requests are drawn at random.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.models.families import FAMILIES
from tests.parity.asked import Asked
from tests.parity.comparing import Reference, assert_equal
from tests.parity.conditions import BATCH, KIND, RUNNERS
from tests.parity.dimensions import (
    FORMS,
    OPS,
    SITES,
    everything,
    group,
    once_each,
    pairs_of,
    pairwise,
)
from tests.parity.draws import REDUCTIONS, Dice, at_random
from tests.parity.running import run
from worker.engine.vllm_engine import VllmEngine

FULL = os.environ.get("TILLER_PARITY") == "full"
DRAWS = int(os.environ.get("TILLER_PARITY_DRAWS", "200"))
COMBINATIONS = list(everything()) if FULL else list(dict.fromkeys([*pairwise(), *once_each()]))
GROUPS = group(COMBINATIONS)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 if FULL or DRAWS > 1000 else 300)]


@pytest.mark.parametrize(
    ("engine", "condition"),
    [
        pytest.param((family, KIND[condition]), condition, id=f"{family}-{condition}")
        for family, condition in GROUPS
    ],
    indirect=["engine"],
)
def test_every_row_and_token_equals_the_reference(
    engine: VllmEngine, reference: Reference, condition: str
) -> None:
    RUNNERS[condition](engine, reference, GROUPS[engine.facts.model, condition])


def test_the_combinations_hold_every_pair_that_exists() -> None:
    every = set().union(*map(pairs_of, everything()))
    held = set().union(*map(pairs_of, COMBINATIONS))
    assert held == every
    together = {(one.op, one.site, one.form) for one in COMBINATIONS}
    assert len(together) == len(OPS) * len(SITES) * len(FORMS)
    assert {one.family for one in COMBINATIONS} == set(FAMILIES)


# Beside each other; or, in little room, in chunks and now and then preempted.
LENGTHS = {
    "roomy": {"prompt": (1, 40), "tokens": (1, 9)},
    "tight": {"prompt": (1, 90), "tokens": (1, 24)},
}
SHARE = -(-DRAWS // (len(FAMILIES) * len(LENGTHS)))


def draws_of(family: str, kind: str) -> list[Asked]:
    """Draw the share of the random requests that a family and kind of engine gets."""
    dice = Dice(("random", family, kind))
    return [at_random(dice, FAMILIES[family], **LENGTHS[kind]) for _ in range(SHARE)]


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        pytest.param((family, kind), kind, id=f"{family}-{kind}")
        for family in FAMILIES
        for kind in LENGTHS
    ],
    indirect=["engine"],
)
def test_random_mixtures_equal_the_reference(
    engine: VllmEngine, reference: Reference, kind: str
) -> None:
    asked = draws_of(engine.facts.model, kind)
    for begin in range(0, len(asked), BATCH):
        some = asked[begin : begin + BATCH]
        ran = run(engine, some)
        assert ran.seen.together > 1 or len(some) == 1
        names = range(begin, begin + len(some))
        assert_equal(names, some, reference.compare(some, ran.outcomes))


def test_the_random_mixtures_hold_every_op_site_form_and_reduction() -> None:
    drawn: Counter[str] = Counter()
    asked = [one for family in FAMILIES for kind in LENGTHS for one in draws_of(family, kind)]
    assert len(asked) >= DRAWS
    for one in asked:
        drawn.update(one.kinds)
    wanted = {*OPS, *SITES, *FORMS, *REDUCTIONS, "heads", "before", "after", "several in order"}
    assert all(drawn[kind] >= 3 for kind in wanted), drawn
