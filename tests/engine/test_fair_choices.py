"""Completions of several accounts in one engine: none waits for all choices of another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from app.completions.records import ClaimedCompletion
from app.completions.spec import RequestSpec, Sampling
from app.kit.ids import new_uuid
from app.steering.spec import Capture, Site
from tests.engine.engines import ACCOUNT, engine_for, run_alone
from tests.engine.watching import scheduler
from worker.completion_choices import ChoiceRunner
from worker.engine.protocol import Piece
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Errored, Succeeded

SEATS, URGENT_SEATS = 4, 2
OTHER = UUID(int=2)
PROMPT = (5, 9, 17, 33)


@pytest.fixture(scope="module")
def narrow(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine with few seats."""
    scratch = tmp_path_factory.mktemp("scratch")
    with engine_for(tiny_llama, scratch, max_num_seqs=SEATS, urgent_seats=URGENT_SEATS) as engine:
        yield engine


def a_completion(account_id: UUID, **sampling: Any) -> ClaimedCompletion:
    spec = RequestSpec(PROMPT, None, Sampling(**{"max_tokens": 2, "ignore_eos": True, **sampling}))
    return ClaimedCompletion(new_uuid(), account_id, (spec,))


def test_one_token_of_another_account_does_not_wait_for_a_thousand_choices(
    narrow: VllmEngine,
) -> None:
    ended: list[UUID] = []
    in_engine: list[int] = []
    running: list[int] = []
    inner = scheduler(narrow)
    schedule = inner.schedule

    async def everything(patch: pytest.MonkeyPatch) -> None:
        runner, loop, began = ChoiceRunner(narrow), asyncio.get_running_loop(), asyncio.Event()

        def watching(*args: Any, **kwargs: Any) -> Any:
            if not began.is_set():
                loop.call_soon_threadsafe(began.set)
            in_engine.append(len(inner.requests))
            output = schedule(*args, **kwargs)
            running.append(len(inner.running))
            return output

        patch.setattr(inner, "schedule", watching)

        async def one(claimed: ClaimedCompletion) -> None:
            await runner.run(claimed, None)
            ended.append(claimed.account_id)

        many = [asyncio.ensure_future(one(a_completion(ACCOUNT, n=64))) for _ in range(16)]
        await began.wait()
        await one(a_completion(OTHER, max_tokens=1))
        await asyncio.gather(*many)

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(everything(patch))
    assert ended[0] == OTHER, "before any of the 16"
    assert ended[1:] == [ACCOUNT] * 16
    assert max(running) <= SEATS + URGENT_SEATS
    assert max(in_engine) <= 2 * (SEATS + URGENT_SEATS), "the rest waits outside"
    assert SEATS in running, "an account alone has a whole batch"


def outcome_of(narrow: VllmEngine, claimed: ClaimedCompletion) -> Succeeded | Errored:
    (outcome,) = asyncio.run(ChoiceRunner(narrow).run(claimed, None))
    return outcome


def test_choices_that_run_one_by_one_are_those_of_one_request(narrow: VllmEngine) -> None:
    claimed = a_completion(
        ACCOUNT, n=7, seed=11, max_tokens=6, temperature=1.0, logprobs=2, prompt_logprobs=1
    )
    whole = run_alone(narrow, claimed.specs[0])
    outcome = outcome_of(narrow, claimed)
    assert isinstance(whole, Succeeded)
    assert isinstance(outcome, Succeeded)
    assert [choice.token_ids for choice in outcome.choices] == [
        choice.token_ids for choice in whole.choices
    ]
    assert [choice.index for choice in outcome.choices] == list(range(7))
    assert len({choice.token_ids for choice in outcome.choices}) > 1
    assert outcome.prompt_logprobs is not None
    assert len(outcome.prompt_logprobs) == len(PROMPT)
    assert all(choice.top_logprobs is not None for choice in outcome.choices)


def test_pieces_of_many_choices_name_their_own(narrow: VllmEngine) -> None:
    claimed = a_completion(ACCOUNT, n=7, seed=11, max_tokens=6, temperature=1.0)
    tokens: dict[int, tuple[int, ...]] = {}

    def give(place: int, piece: Piece) -> None:
        assert place == 0
        tokens[piece.choice] = tokens.get(piece.choice, ()) + piece.token_ids

    (outcome,) = asyncio.run(ChoiceRunner(narrow).run(claimed, give))
    assert isinstance(outcome, Succeeded)
    assert tokens == {choice.index: choice.token_ids for choice in outcome.choices}


def test_the_error_of_a_choice_is_that_of_its_prompt(narrow: VllmEngine) -> None:
    read = Capture("residual_stream", Site.resid_post, (99,))
    broken = a_completion(ACCOUNT, n=3)
    broken = replace(broken, specs=(replace(broken.specs[0], captures=(read,)),))
    fine = a_completion(ACCOUNT, n=2)
    claimed = ClaimedCompletion(new_uuid(), ACCOUNT, (*broken.specs, *fine.specs))
    outcomes = asyncio.run(ChoiceRunner(narrow).run(claimed, None))
    assert isinstance(outcomes[1], Succeeded)
    assert len(outcomes[1].choices) == 2
    assert isinstance(outcomes[0], Errored)
    assert "Layer 99" in outcomes[0].message
