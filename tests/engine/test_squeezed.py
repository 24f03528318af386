"""Little room and small steps: preemption and chunked prefill neither lose nor double a row.

Urgent requests are not what is preempted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.completions.salt import salt_for
from tests.engine.engines import ACCOUNT, engine_for, run_together
from tests.engine.mixes import Case, mixed_cases, worst_error
from tests.engine.watching import watched
from tests.reference import plain_forward
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Outcome


@pytest.fixture(scope="module")
def squeezed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """12 KV blocks of 32 tokens, and at most 64 tokens a step."""
    with engine_for(
        tiny_llama,
        tmp_path_factory.mktemp("scratch"),
        kv_cache_bytes=12 * 65_536,
        max_num_batched_tokens=64,
    ) as started:
        yield started


def test_preempted_requests_equal_the_reference(squeezed: VllmEngine, tiny_llama: Path) -> None:
    cases = cases_for(squeezed, seed=2, prompt_max=40, tokens_max=60)
    with watched(squeezed) as seen:
        outcomes = run_together(squeezed, [case.spec for case in cases])
    assert seen.preemptions > 0
    model = plain_forward.load(tiny_llama)
    assert max(worst_error(model, *pair) for pair in zip(cases, outcomes, strict=True)) <= 1e-5


def test_prompts_in_chunks_equal_the_reference(squeezed: VllmEngine, tiny_llama: Path) -> None:
    cases = cases_for(squeezed, seed=3, prompt_max=220, tokens_max=9)
    with watched(squeezed) as seen:
        outcomes = run_together(squeezed, [case.spec for case in cases])
    assert sum(chunks > 1 for chunks in seen.chunks.values()) >= 5
    model = plain_forward.load(tiny_llama)
    assert max(worst_error(model, *pair) for pair in zip(cases, outcomes, strict=True)) <= 1e-5


def cases_for(engine: VllmEngine, **changes: int) -> list[Case]:
    return mixed_cases(engine.vectors, count=24, n_layers=4, width=64, vocab=256, **changes)


JOBS = 4
LONG = 110  # tokens: four blocks a request, and there are eleven in all


def test_requests_of_jobs_are_preempted_and_urgent_ones_are_not(
    squeezed: VllmEngine, tiny_llama: Path
) -> None:
    cases = long_cases(squeezed, count=JOBS + 2, seed=4)
    with watched(squeezed) as seen:
        outcomes, _ = asyncio.run(urgent_beside_jobs(squeezed, cases, after=1))
    assert {name.partition("-")[0] for name in seen.preempted} == {"job"}
    model = plain_forward.load(tiny_llama)
    assert max(worst_error(model, *pair) for pair in zip(cases, outcomes, strict=True)) <= 1e-5


def test_an_urgent_request_starts_although_others_hold_the_blocks_that_it_needs(
    squeezed: VllmEngine, tiny_llama: Path
) -> None:
    *cases, last = long_cases(squeezed, count=JOBS + 1, seed=5)
    sampling = replace(last.spec.sampling, max_tokens=3)
    prompt = tuple(range(3, 203))  # seven blocks; the others hold eight when it comes
    cases.append(replace(last, spec=replace(last.spec, prompt_token_ids=prompt, sampling=sampling)))
    with watched(squeezed) as seen:
        outcomes, ended = asyncio.run(urgent_beside_jobs(squeezed, cases, after=40))
    assert ended == ["urgent", *["job"] * JOBS]
    assert {name.partition("-")[0] for name in seen.preempted} == {"job"}
    model = plain_forward.load(tiny_llama)
    assert max(worst_error(model, *pair) for pair in zip(cases, outcomes, strict=True)) <= 1e-5


def long_cases(engine: VllmEngine, *, count: int, seed: int) -> list[Case]:
    """Draw requests with short prompts and LONG tokens."""
    drawn = mixed_cases(
        engine.vectors, count=count, n_layers=4, width=64, vocab=256, seed=seed, prompt_max=10
    )
    return [
        replace(
            case, spec=replace(case.spec, sampling=replace(case.spec.sampling, max_tokens=LONG))
        )
        for case in drawn
    ]


async def urgent_beside_jobs(
    engine: VllmEngine, cases: list[Case], *, after: int
) -> tuple[list[Outcome], list[str]]:
    """Run the first JOBS requests and, once each has made `after` tokens, the others as urgent.

    Give their outcomes, and in which order they ended.
    """
    made: Counter[int] = Counter()
    ended: list[str] = []
    all_began = asyncio.Event()

    def note(number: int) -> None:
        made[number] += 1
        if all(made[each] >= after for each in range(JOBS)):
            all_began.set()

    async def run(number: int, kind: str) -> Outcome:
        spec = cases[number].spec
        outcome = await engine.run(
            f"{kind}-{number}",
            spec,
            salt=salt_for(ACCOUNT, spec),
            urgent=kind == "urgent",
            on_piece=lambda _: note(number),
        )
        ended.append(kind)
        return outcome

    async def enter(kind: str, numbers: range) -> list[asyncio.Future[Outcome]]:
        with engine.core.held():
            tasks = [asyncio.ensure_future(run(number, kind)) for number in numbers]
            for _ in range(3):
                await asyncio.sleep(0)
        return tasks

    running = await enter("job", range(JOBS))
    await all_began.wait()
    running += await enter("urgent", range(JOBS, len(cases)))
    return list(await asyncio.gather(*running)), ended
