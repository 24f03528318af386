"""Little room and small steps: prompts in chunks, preemption, aborts in the middle of a prompt.

The engine runs 64 tokens a step, 6 requests at a time, in 12 blocks of 32 tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from app.completions.spec import RequestSpec
from app.steering.spec import FOREVER, Capture, Site, Spans
from tests.engine.engines import run_alone, run_together
from tests.engine.watching import Watched, scheduler, steering_core, until, watched
from tests.faultlist.asking import (
    LAST,
    SAME,
    add,
    moved_between,
    numbers_of,
    prompt_of,
    request,
    rows_of,
    tokens_of,
    vector,
)
from tests.faultlist.interrupting import at_step, cancel_from_engine
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Outcome, Succeeded
from worker.steering.region import RegionWriter

P, M = 150, 4  # three chunks of 64 tokens
REACH = P + M - 1


@pytest.mark.parametrize(
    "spans",
    [
        ((0, 1), (63, 65), (127, 129), (149, 150)),  # both sides of each cut
        ((0, 10), (20, 100), (101, FOREVER)),  # all but an excluded few
        ((P - 1, FOREVER),),  # the last token of the prompt, not that of each chunk
        ((P, FOREVER),),
        ((0, P),),
        ((REACH - 1, FOREVER),),
    ],
    ids=["cuts", "exclude", "last", "generated", "prompt", "end"],
)
def test_spans_act_on_exactly_their_rows_in_a_prompt_of_many_chunks(
    small_steps: VllmEngine, spans: Spans
) -> None:
    spec = request(prompt_of(P), add(vector(small_steps), spans=spans), max_tokens=M)
    with watched(small_steps) as seen:
        plain, steered = run_together(small_steps, [replace(spec, interventions=()), spec])
    assert min(chunks_of(seen)) > 1
    wanted = {row for start, end in spans for row in range(start, min(end, REACH))}
    assert moved_between(plain, steered) == wanted


def test_positions_act_on_exactly_their_rows_in_a_prompt_of_many_chunks(
    small_steps: VllmEngine,
) -> None:
    places = (0, 63, 64, 127, 128, P - 1, P, REACH - 1)
    name = vector(small_steps, rows=len(places))
    spec = request(prompt_of(P), add(name, positions=places), max_tokens=M)
    with watched(small_steps) as seen:
        plain, steered = run_together(small_steps, [replace(spec, interventions=()), spec])
    assert min(chunks_of(seen)) > 1
    assert moved_between(plain, steered) == set(places)
    change = rows_of(steered) - rows_of(plain)
    assert np.allclose(change[list(places)], numbers_of(small_steps, name), atol=SAME)


def test_a_capture_of_the_last_token_has_one_row_of_the_prompt(small_steps: VllmEngine) -> None:
    captures = (
        Capture("rows", Site.resid_post, (LAST,)),
        Capture("last", Site.resid_post, (LAST,), spans=((P - 1, FOREVER),)),
        Capture("window", Site.resid_post, (LAST,), spans=((60, 70), (P - 2, P + 1))),
    )
    outcome = run_alone(small_steps, request(prompt_of(P), captures=captures, max_tokens=M))
    whole, last, window = (rows_of(outcome, capture=index) for index in range(3))
    assert whole.shape[0] == REACH
    assert np.array_equal(last, whole[P - 1 :])
    assert np.array_equal(window, np.concatenate([whole[60:70], whole[P - 2 : P + 1]]))


def test_long_and_short_prompts_that_join_and_leave_equal_those_that_run_alone(
    small_steps: VllmEngine,
) -> None:
    lengths = (200, 1, 90, 2, 7, 130, 1, 65, 64, 63, 30, 3, 180, 1)
    specs = [
        request(
            prompt_of(length, seed=seed),
            add(vector(small_steps, seed=seed), layer=seed % 4),
            max_tokens=1 + seed % 5,
        )
        for seed, length in enumerate(lengths)
    ]
    alone = [run_alone(small_steps, spec) for spec in specs]
    with watched(small_steps) as seen:
        together = run_together(small_steps, specs)
    assert sum(chunks > 1 for chunks in chunks_of(seen)) >= 4
    for one, other in zip(alone, together, strict=True):
        for layer in range(4):
            assert np.allclose(rows_of(one, layer), rows_of(other, layer), rtol=1e-4, atol=SAME)


@pytest.mark.parametrize("step", [2, 3])
def test_an_abort_in_the_middle_of_a_prompt_leaves_nothing_and_disturbs_nobody(
    small_steps: VllmEngine, step: int
) -> None:
    folder = small_steps._config.scratch_dir / "captures"
    core = steering_core(small_steps)
    neighbour = request(prompt_of(9), add(vector(small_steps, seed=1)), max_tokens=12)
    doomed = request(prompt_of(200), add(vector(small_steps, seed=2)), max_tokens=20)
    alone = run_alone(small_steps, neighbour)
    until(lambda: not scheduler(small_steps).has_requests())
    files, blocks = len(list(folder.iterdir())), free_blocks(small_steps)

    async def abort() -> tuple[Outcome, int]:
        loop, tasks = asyncio.get_running_loop(), {}

        def cancel() -> None:
            cancel_from_engine(small_steps, loop, tasks["doomed"])

        with at_step(small_steps, step, cancel) as scheduled:
            with small_steps.core.held():
                for key, spec in (("beside", neighbour), ("doomed", doomed)):
                    tasks[key] = asyncio.ensure_future(small_steps.run(key, spec, salt=key))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await tasks["doomed"]
            outcome = await tasks["beside"]
        return outcome, sum(scheduled[key] for key in scheduled if key.startswith("doomed"))

    outcome, ran = asyncio.run(abort())
    assert 0 < ran < 200  # it had begun its prompt, and never ended it
    assert np.allclose(rows_of(outcome), rows_of(alone), atol=SAME)
    until(lambda: core.tenants == 0 and not scheduler(small_steps).has_requests())
    assert len(list(folder.iterdir())) == files + 1  # the neighbour's rows
    assert free_blocks(small_steps) == blocks


def test_a_preempted_request_has_the_rows_of_one_that_was_not(small_steps: VllmEngine) -> None:
    wrong, seen = wrong_rows(small_steps)
    assert seen.preemptions > 0
    assert wrong == 0


def test_with_rows_that_are_appended_a_preempted_request_has_wrong_rows(
    small_steps: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: Any = RegionWriter.put
    ends: WeakKeyDictionary[RegionWriter, int] = WeakKeyDictionary()

    def append(self: RegionWriter, rows: np.ndarray, row: int, place: int) -> None:
        """Put rows behind those that came before; what is over the end is cut off."""
        end = ends.setdefault(self, 0)
        put(self, rows, end, place)
        ends[self] = end + len(rows)

    alone = crowd_alone(small_steps)
    monkeypatch.setattr(RegionWriter, "put", append)
    wrong, seen = wrong_rows(small_steps, alone)
    assert seen.preemptions > 0
    assert wrong > 0


def crowd(engine: VllmEngine) -> list[RequestSpec]:
    return [
        request(prompt_of(40, seed=seed), add(vector(engine, seed=seed)), max_tokens=60)
        for seed in range(6)
    ]


def crowd_alone(engine: VllmEngine) -> list[Outcome]:
    return [run_alone(engine, spec) for spec in crowd(engine)]


def wrong_rows(engine: VllmEngine, alone: list[Outcome] | None = None) -> tuple[int, Watched]:
    """Run more than fits together and count the rows that differ from those of quiet runs."""
    alone = alone or crowd_alone(engine)
    with watched(engine) as seen:
        together = run_together(engine, crowd(engine))
    wrong = 0
    for one, other in zip(alone, together, strict=True):
        assert isinstance(other, Succeeded)
        assert tokens_of(one) == tokens_of(other)
        wrong += int((np.abs(rows_of(one) - rows_of(other)).max(axis=1) > SAME).sum())
    return wrong, seen


def chunks_of(seen: Watched) -> list[int]:
    """Say for each request with a long prompt in how many steps its prompt ran."""
    return list(seen.chunks.values())


def free_blocks(engine: VllmEngine) -> int:
    return int(scheduler(engine).kv_cache_manager.block_pool.get_num_free_blocks())
