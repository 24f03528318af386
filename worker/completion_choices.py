"""Runs Completions in the engine, choice by choice: no account has more there than its share.

Each choice is an engine request of its own, so a Completion of 128 choices waits for seats as 128
Completions do. What waits here costs the engine nothing: it would walk through its whole queue
at every step.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from app.completions.records import ClaimedCompletion
from app.completions.salt import salt_for
from app.completions.spec import RequestSpec
from worker.engine.protocol import Engine, EngineRequestError, Piece
from worker.outcomes import Errored, Succeeded
from worker.shares import Shares

GivePiece = Callable[[int, Piece], None]


class ChoiceRunner:
    """Runs the choices of all Completions of one worker."""

    def __init__(self, engine: Engine) -> None:
        """Share the engine's seats; one account may have as many as the engine's batch."""
        self._engine = engine
        facts = engine.facts
        self._seats = Shares(facts.max_num_seqs + facts.urgent_seats, facts.max_num_seqs)

    async def run(
        self, claimed: ClaimedCompletion, give: GivePiece | None
    ) -> list[Succeeded | Errored]:
        """Run all choices of all prompts; the failure or abort of one ends the others.

        Gives an outcome for each prompt. Pieces go to `give` with the place of their prompt.
        Raises EngineDeadError and asyncio.CancelledError.
        """
        tasks = [
            asyncio.ensure_future(self._run_choice(claimed, place, choice, give))
            for place, spec in enumerate(claimed.specs)
            for choice in range(spec.sampling.n)
        ]
        try:
            outcomes = iter(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Succeeded):
                    ended.release()
            raise
        return [joined([next(outcomes) for _ in range(spec.sampling.n)]) for spec in claimed.specs]

    async def _run_choice(
        self, claimed: ClaimedCompletion, place: int, choice: int, give: GivePiece | None
    ) -> Succeeded | Errored:
        spec = claimed.specs[place]
        on_piece = None if give is None else partial(_give_choice, give, place, choice)
        async with self._seats.taken(claimed.account_id):
            try:
                outcome = await self._engine.run(
                    f"{claimed.id.hex}.{place}.{choice}",
                    choice_of(spec, choice),
                    salt=salt_for(claimed.account_id, spec),
                    urgent=True,
                    on_piece=on_piece,
                )
            except EngineRequestError as error:
                return Errored(error.code, str(error))
        if isinstance(outcome, Succeeded):
            return replace(
                outcome, choices=tuple(replace(each, index=choice) for each in outcome.choices)
            )
        if isinstance(outcome, Errored):
            return outcome
        raise asyncio.CancelledError


def choice_of(spec: RequestSpec, choice: int) -> RequestSpec:
    """Make the request of one choice: its seed, and the prompt's logprobs with the first alone."""
    sampling = spec.sampling
    if sampling.n == 1:
        return spec
    return replace(
        spec,
        sampling=replace(
            sampling,
            n=1,
            seed=None if sampling.seed is None else sampling.seed + choice,
            prompt_logprobs=sampling.prompt_logprobs if choice == 0 else None,
        ),
    )


def joined(outcomes: Sequence[Succeeded | Errored]) -> Succeeded | Errored:
    """Join the choices of one prompt; the first that errored decides."""
    done: list[Succeeded] = []
    for outcome in outcomes:
        if isinstance(outcome, Errored):
            for each in outcomes:
                if isinstance(each, Succeeded):
                    each.release()
            return outcome
        done.append(outcome)
    return replace(
        done[0],
        choices=tuple(choice for outcome in done for choice in outcome.choices),
        started_at=min(outcome.started_at for outcome in done),
        finished_at=max(outcome.finished_at for outcome in done),
    )


def logprob_entries(specs: Sequence[RequestSpec]) -> int:
    """Count the alternatives that requests may list at most: what their memory grows with."""
    return sum(
        spec.prompt_tokens * _listed(spec.sampling.prompt_logprobs)
        + spec.sampling.n * spec.sampling.max_tokens * _listed(spec.sampling.logprobs)
        for spec in specs
    )


def _listed(count: int | None) -> int:
    return 0 if count is None else count + 1


def _give_choice(give: GivePiece, place: int, choice: int, piece: Piece) -> None:
    give(place, piece if choice == 0 else replace(piece, choice=choice))
