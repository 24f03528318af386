"""Run combinations under the condition that they name, and assert that it came about."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.models.families import FAMILIES
from tests.parity.asked import Asked
from tests.parity.comparing import Reference, assert_equal
from tests.parity.dimensions import Combination
from tests.parity.draws import Dice, at_random, for_combination
from tests.parity.running import run
from worker.engine.vllm_engine import VllmEngine

BATCH = 32
KIND = {
    "alone": "roomy",
    "batch": "roomy",
    "cached": "roomy",
    "chunked": "tight",
    "preempted": "tight",
    "compiled": "compiled",
}


def alone(engine: VllmEngine, reference: Reference, chosen: list[Combination]) -> None:
    """Run each with nothing beside it."""
    asked = drawn(chosen, prompt=(1, 40), tokens=(4, 9))
    outcomes = []
    for one in asked:
        ran = run(engine, [one])
        assert ran.seen.together == 1
        outcomes += ran.outcomes
    assert_equal(chosen, asked, reference.compare(asked, outcomes))


def batch(engine: VllmEngine, reference: Reference, chosen: list[Combination]) -> None:
    """Run them in batches of 32, filled up with random requests; all 32 must be right."""
    family = FAMILIES[chosen[0].family]
    for some in _parts(chosen, BATCH):
        dice = Dice(("neighbours", some))
        asked = drawn(some, prompt=(1, 40), tokens=(4, 9))
        names: list[object] = list(some)
        while len(asked) < BATCH:
            asked.append(at_random(dice, family))
            names.append("neighbour")
        order = dice.choices.sample(range(BATCH), BATCH)
        asked, names = [asked[k] for k in order], [names[k] for k in order]
        ran = run(engine, asked)
        assert ran.seen.together == BATCH
        assert_equal(names, asked, reference.compare(asked, ran.outcomes))


def compiled(engine: VllmEngine, reference: Reference, chosen: list[Combination]) -> None:
    """Run them in such batches in an engine that compiles."""
    from vllm.config import CompilationMode

    from worker.engine.in_process import InProcessCore

    assert engine.facts.mode == "compiled"
    assert isinstance(engine.core, InProcessCore)
    assert engine.core.config.compilation_config.mode != CompilationMode.NONE
    batch(engine, reference, chosen)


def cached(engine: VllmEngine, reference: Reference, chosen: list[Combination]) -> None:
    """Run each after a plain request with its prompt, and again: only then it meets its own."""
    for some in _parts(chosen, BATCH):
        asked = drawn(some, prompt=(34, 100), tokens=(4, 9))
        run(engine, [replace(one, edits=(), reads=()) for one in asked])
        for warm in (False, True):
            ran = run(engine, asked)
            for name, key in zip(some, ran.keys, strict=True):
                assert (ran.seen.cached[key] > 0) is warm, (name, ran.seen.cached[key])
            assert_equal(some, asked, reference.compare(asked, ran.outcomes))


def chunked(engine: VllmEngine, reference: Reference, chosen: list[Combination]) -> None:
    """Run prompts that are longer than a step may be, a few at a time."""
    for some in _parts(chosen, 8):
        asked = drawn(some, prompt=(60, 110), tokens=(4, 9))
        ran = run(engine, asked)
        for name, key in zip(some, ran.keys, strict=True):
            assert ran.seen.chunks[key] > 1, name
        assert_equal(some, asked, reference.compare(asked, ran.outcomes))


def preempted(engine: VllmEngine, reference: Reference, chosen: list[Combination]) -> None:
    """Run each behind four others that grow until it has to make room, and starts over."""
    for one in chosen:
        family = FAMILIES[one.family]
        dice = Dice(("ahead", one))
        ahead = [at_random(dice, family, prompt=(16, 24), tokens=(20, 24)) for _ in range(4)]
        asked = [*ahead, *drawn([one], prompt=(8, 24), tokens=(24, 24))]
        ran = run(engine, asked)
        assert ran.seen.preempted[ran.keys[-1]] > 0, one
        names = ["ahead"] * len(ahead) + [one]
        assert_equal(names, asked, reference.compare(asked, ran.outcomes))


def drawn(
    chosen: Sequence[Combination], *, prompt: tuple[int, int], tokens: tuple[int, int]
) -> list[Asked]:
    """Draw a request for each, of lengths within these bounds."""
    asked = []
    for one in chosen:
        rng = random.Random(repr(tuple(one)))
        asked.append(for_combination(one, prompt=rng.randint(*prompt), tokens=rng.randint(*tokens)))
    return asked


def _parts(chosen: list[Combination], size: int) -> Iterator[list[Combination]]:
    for begin in range(0, len(chosen), size):
        yield chosen[begin : begin + size]


RUNNERS: dict[str, Callable[[VllmEngine, Reference, list[Combination]], None]] = {
    "alone": alone,
    "batch": batch,
    "cached": cached,
    "chunked": chunked,
    "preempted": preempted,
    "compiled": compiled,
}
