"""A group gives the same bits whatever the engine did before and however its requests arrive."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Intervention, Op, Site
from tests.engine.engines import engine_for, run_alone, run_together
from tests.engine.watching import scheduler, until, watched
from worker.engine.protocol import Group
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Errored, Outcome, Succeeded

COUNT = 12
WANTING = 3  # a request that steers with a vector that was never stored, where a test wants one
ROOT = Path(__file__).parents[2]
_keys = itertools.count()

Submit = Callable[[int], "asyncio.Task[Outcome]"]
Arrive = Callable[[Submit], Awaitable[None]]


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An in-process engine in bfloat16: a batch of 16, prompts in several chunks."""
    scratch = tmp_path_factory.mktemp("scratch")
    changes: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_num_seqs": 16,
        "max_model_len": 512,
        "max_num_batched_tokens": 1024,
    }
    with engine_for(tiny_llama, scratch, **changes) as started:
        started.vectors.put("sv_some", np.linspace(-1, 1, 64, dtype=np.float32))
        yield started


def group_specs() -> list[RequestSpec]:
    """Describe requests that differ in all: length, seed, choices, steering, captures."""
    numbers = random.Random(4)
    steer = Intervention(Op.add, Site.resid_post, 1, "sv_some", 0, scale=2.0)
    specs = []
    for index in range(COUNT):
        prompt = tuple(numbers.randrange(3, 256) for _ in range(numbers.randrange(150, 300)))
        sampling = Sampling(
            max_tokens=numbers.randrange(6, 20),
            temperature=1.0 if index % 3 else 0.0,
            seed=index,
            n=2 if index % 6 == 1 else 1,
            logprobs=2,
        )
        captured = (Capture("rows", Site.resid_post, (0, 3)),) if sampling.n == 1 else ()
        steered = (steer,) if index % 2 else ()
        specs.append(RequestSpec(prompt, None, sampling, steered, captured))
    return specs


def run_with_two_threads(test: str) -> None:
    """Run a test in another process: with one thread the sums of a row ignore its batch."""
    ours = ("PYTEST_", "OMP_", "VLLM_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", test],
        cwd=ROOT,
        env={**variables, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def others(count: int) -> list[RequestSpec]:
    """Describe requests that have nothing to do with the group."""
    numbers = random.Random(5)
    return [
        RequestSpec(
            tuple(numbers.randrange(3, 256) for _ in range(numbers.randrange(3, 60))),
            None,
            Sampling(max_tokens=30, temperature=1.0, ignore_eos=True),
        )
        for _ in range(count)
    ]


def run_group(
    engine: VllmEngine, specs: Sequence[RequestSpec], arrive: Arrive, *, salt: str = ""
) -> list[Outcome | None]:
    """Run a group whose requests `arrive` submits, each once; None for one that was cancelled."""

    async def everything() -> list[Outcome | None]:
        key = f"group-{next(_keys)}"
        *firsts, size = itertools.accumulate((spec.sampling.n for spec in specs), initial=0)
        tasks: dict[int, asyncio.Task[Outcome]] = {}

        def submit(index: int) -> asyncio.Task[Outcome]:
            name, group = f"{key}.{index}", Group(key, size, firsts[index])
            run = engine.run(name, specs[index], salt=salt or name, group=group)
            tasks[index] = asyncio.ensure_future(run)
            return tasks[index]

        await arrive(submit)
        ended = await asyncio.gather(
            *(tasks[index] for index in range(len(specs))), return_exceptions=True
        )
        return [None if isinstance(each, BaseException) else each for each in ended]

    return asyncio.run(asyncio.wait_for(everything(), 60))


async def at_once(submit: Submit) -> None:
    """Submit everything in order and without a pause."""
    for index in range(COUNT):
        submit(index)


def scrambled(engine: VllmEngine) -> Arrive:
    """Submit in another order, while other requests run before, between and after."""

    def start(specs: list[RequestSpec]) -> list[asyncio.Task[Outcome]]:
        return [
            asyncio.ensure_future(engine.run(f"other-{next(_keys)}", spec, salt="others"))
            for spec in specs
        ]

    async def arrive(submit: Submit) -> None:
        order = list(range(COUNT))
        random.Random(6).shuffle(order)
        around = start(others(10))
        for place, index in enumerate(order):
            submit(index)
            if place % 4 == 1:
                await asyncio.gather(*start(others(1)))  # as long as a whole request takes
        around += start(others(10))
        assert all(isinstance(each, Succeeded) for each in await asyncio.gather(*around))

    return arrive


def bits(outcomes: Sequence[Outcome | None]) -> list[Any]:
    """Give everything of outcomes that must repeat, in comparable values."""
    found: list[Any] = []
    for outcome in outcomes:
        if not isinstance(outcome, Succeeded):
            found.append(outcome)
            continue
        rows = [
            (capture.name, layer, np.asarray(values).tobytes())
            for capture in outcome.captures
            for layer, values in sorted(capture.layers.items())
        ]
        found.append((outcome.choices, rows))
        outcome.release()
    return found


@dataclass
class Steps:
    """What steps were made of.

    `batches`: the first parts of the keys of each; `entered`: requests in the order in which they
    came in; `counts`: in how many steps each request of a group was, by index and choice.
    """

    batches: list[set[str]] = field(default_factory=list)
    entered: list[str] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forget what was seen."""
        self.batches.clear()
        self.entered.clear()
        self.counts.clear()


@pytest.fixture
def steps(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Watch what the engine puts together."""
    inner = scheduler(engine)
    schedule, seen = inner.schedule, Steps()

    def watching(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        seen.batches.append({key.split(".")[0] for key in output.num_scheduled_tokens})
        seen.entered += [new.req_id for new in output.scheduled_new_reqs]
        keys = [key.split(".") for key in output.num_scheduled_tokens if key.startswith("group")]
        seen.counts.update((index, choice) for _, index, choice, *_ in keys)
        return output

    monkeypatch.setattr(inner, "schedule", watching)
    return seen


def test_a_group_repeats_bit_for_bit_after_a_busy_time_and_a_scrambled_arrival(
    engine: VllmEngine, steps: Steps
) -> None:
    specs = group_specs()
    first = bits(run_group(engine, specs, at_once))
    assert all(isinstance(each, tuple) for each in first)
    counts = dict(steps.counts)
    steps.clear()
    second = bits(run_group(engine, specs, scrambled(engine)))
    assert steps.counts == counts
    assert second == first
    groups = [batch for batch in steps.batches if any(key.startswith("group") for key in batch)]
    assert groups, "the group ran"
    assert all(len(batch) == 1 for batch in groups), "nothing beside it"
    assert any(key.startswith("other") for batch in steps.batches for key in batch)
    entered = [key.split(".") for key in steps.entered if key.startswith("group")]
    places = [(int(index), int(choice)) for _, index, choice, *_ in entered]
    assert places == sorted(places), "in order of index and choice"
    assert len(places) == sum(spec.sampling.n for spec in specs)


def test_without_a_group_the_same_requests_do_not_repeat(
    engine: VllmEngine, request: pytest.FixtureRequest
) -> None:
    """The negative control: other batches around them, and some rows have other bits."""
    if os.environ.get("OMP_NUM_THREADS") == "1":
        run_with_two_threads(request.node.nodeid)
        return
    specs = group_specs()
    first = bits(run_group(engine, specs, at_once))
    long = [replace(spec, prompt_token_ids=spec.prompt_token_ids * 8) for spec in others(8)]
    runs = [bits([run_alone(engine, spec) for spec in specs])]
    runs += [bits(run_together(engine, [*long[:beside], *specs])[beside:]) for beside in (1, 3, 8)]
    assert [index for index in range(COUNT) if any(run[index] != first[index] for run in runs)]


def test_a_group_reads_nothing_from_the_prefix_cache(engine: VllmEngine) -> None:
    cached = []
    generate = engine.core.generate

    async def watching(*args: Any, **kwargs: Any) -> Any:
        output = await generate(*args, **kwargs)
        cached.append(output.num_cached_tokens)
        return output

    specs = [replace(group_specs()[0], captures=())] * COUNT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.core, "generate", watching)
        for _ in range(2):
            run_group(engine, specs, at_once, salt="the same")
    assert cached == [0] * (2 * COUNT)


def test_a_group_does_not_wait_for_a_request_that_was_refused(engine: VllmEngine) -> None:
    specs = group_specs()
    steer = Intervention(Op.add, Site.resid_post, 1, "sv_never", 0)
    specs[WANTING] = replace(specs[WANTING], interventions=(steer,))
    first = bits(run_group(engine, specs, at_once))
    second = bits(run_group(engine, specs, scrambled(engine)))
    assert isinstance(first[WANTING], Errored)
    assert first[WANTING].code == "unknown_vector"
    assert second == first
    assert sum(isinstance(each, tuple) for each in first) == COUNT - 1


def test_a_group_does_not_wait_for_a_request_that_was_aborted_while_it_waited(
    engine: VllmEngine, steps: Steps
) -> None:
    async def arrive(submit: Submit) -> None:
        tasks = [submit(index) for index in range(COUNT - 1)]
        async with asyncio.timeout(10):
            while len(scheduler(engine).requests) < 11:  # noqa: ASYNC110 (vLLM sets no event)
                await asyncio.sleep(0.001)
        assert not steps.entered, "all of them wait"
        tasks[WANTING].cancel()
        await asyncio.gather(tasks[WANTING], return_exceptions=True)
        submit(COUNT - 1)

    ended = run_group(engine, group_specs(), arrive)
    assert ended.pop(WANTING) is None
    assert all(isinstance(each, Succeeded) for each in ended)
    assert not any(f".{WANTING}." in key for key in steps.entered)


def test_an_abort_in_a_running_group_leaves_the_batches_of_the_others_as_they_were(
    engine: VllmEngine, steps: Steps
) -> None:
    specs = group_specs()
    longest = max(range(COUNT), key=lambda index: specs[index].sampling.max_tokens)
    first = bits(run_group(engine, specs, at_once))
    counts = dict(steps.counts)
    steps.clear()

    async def arrive(submit: Submit) -> None:
        tasks = [submit(index) for index in range(COUNT)]
        async with asyncio.timeout(10):
            while len(steps.entered) < COUNT:  # noqa: ASYNC110 (vLLM sets no event)
                await asyncio.sleep(0)
        tasks[longest].cancel()

    second = bits(run_group(engine, specs, arrive))
    assert second[longest] is None
    second[longest] = first[longest]
    assert second == first
    until(lambda: not scheduler(engine).requests)
    others_counts = {key: count for key, count in counts.items() if key[0] != str(longest)}
    assert {key: steps.counts[key] for key in others_counts} == others_counts
    assert steps.counts[str(longest), "0"] >= max(others_counts.values()) - 1, "it stayed"


def test_a_group_that_nobody_waits_for_any_more_leaves_the_engine(
    engine: VllmEngine, steps: Steps
) -> None:
    long = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
    specs = [replace(spec, sampling=long) for spec in group_specs()]

    async def arrive(submit: Submit) -> None:
        tasks = [submit(index) for index in range(COUNT)]
        async with asyncio.timeout(10):
            while not steps.entered:  # noqa: ASYNC110 (vLLM sets no event)
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()

    assert run_group(engine, specs, arrive) == [None] * COUNT
    until(lambda: not scheduler(engine).requests)
    assert len(steps.batches) < 200
    assert isinstance(run_alone(engine, others(1)[0]), Succeeded)


def test_seeded_requests_draw_the_same_tokens_when_a_prompt_comes_in_chunks(
    engine: VllmEngine,
) -> None:
    """One of them is cut by the budget of a step; no generator is used before its time."""
    drawn = [Sampling(max_tokens=4, temperature=1.0, seed=index) for index in range(8)]
    pairs = zip(group_specs(), drawn, strict=False)
    specs = [replace(spec, sampling=sampling, captures=()) for spec, sampling in pairs]
    alone = [run_alone(engine, spec) for spec in specs]
    with watched(engine) as seen:
        beside = run_together(engine, specs, account=UUID(int=2))  # nothing of it is cached
    assert 2 in seen.chunks.values()
    for one, other in zip(alone, beside, strict=True):
        assert isinstance(one, Succeeded)
        assert isinstance(other, Succeeded)
        assert other.choices[0].token_ids == one.choices[0].token_ids


def test_notes_about_empty_seats_reach_an_engine_in_a_process_of_its_own(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """One is refused before the engine hears of it, one is aborted: the others run."""
    words = [sys.executable, "-m", "tests.engine.serve_group", str(tiny_llama), str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["CancelledError Errored" + " Succeeded" * 10], (
        done.stderr
    )
