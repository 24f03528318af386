"""Tokens given as they are made, and urgent requests, which wait for nobody's end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Site
from tests.engine.engines import engine_for, run_alone
from tests.engine.watching import scheduler
from worker.engine.protocol import Group, Piece
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Succeeded

PROMPT = (5, 9, 17, 33)
SEATS, URGENT_SEATS = 2, 2
LONG = 150  # tokens: many more steps than urgent requests take


@pytest.fixture(scope="module")
def narrow(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine with few seats."""
    scratch = tmp_path_factory.mktemp("scratch")
    with engine_for(tiny_llama, scratch, max_num_seqs=SEATS, urgent_seats=URGENT_SEATS) as engine:
        yield engine


def request(max_tokens: int, **fields: Any) -> RequestSpec:
    captures = fields.pop("captures", ())
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **fields})
    return RequestSpec(PROMPT, None, sampling, captures=captures)


async def together(
    engine: VllmEngine, long: int, urgent: int, most: dict[str, int] | None = None
) -> list[str]:
    """Run long requests and, once all seats are taken, urgent ones; give the order of ends."""
    ended: list[str] = []
    inner = scheduler(engine)
    schedule, loop, all_seated = inner.schedule, asyncio.get_running_loop(), asyncio.Event()

    def watching(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if len(inner.running) >= SEATS:
            loop.call_soon_threadsafe(all_seated.set)
        if most is not None:
            names = [each.request_id for each in inner.running]
            most["long"] = max(most["long"], sum("long" in name for name in names))
            most["all"] = max(most["all"], len(names))
        return output

    async def one(name: str, spec: RequestSpec, *, is_urgent: bool) -> None:
        await engine.run(name, spec, salt="salt", urgent=is_urgent)
        ended.append(name.partition("-")[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner, "schedule", watching)
        with engine.core.held():  # type: ignore[union-attr]
            running = [
                asyncio.ensure_future(one(f"long-{number}", request(LONG), is_urgent=False))
                for number in range(long)
            ]
            for _ in range(3):
                await asyncio.sleep(0)
        await all_seated.wait()
        running += [
            asyncio.ensure_future(one(f"urgent-{number}", request(3), is_urgent=True))
            for number in range(urgent)
        ]
        await asyncio.gather(*running)
    return ended


def test_an_urgent_request_ends_before_those_that_wait_and_those_that_run(
    narrow: VllmEngine,
) -> None:
    order = asyncio.run(together(narrow, 8, 1))
    assert order == ["urgent", *["long"] * 8]


def test_urgent_requests_take_no_more_seats_than_they_have(narrow: VllmEngine) -> None:
    most = {"long": 0, "all": 0}
    order = asyncio.run(together(narrow, 6, 5, most))
    assert order[:5] == ["urgent"] * 5
    assert most == {"long": SEATS, "all": SEATS + URGENT_SEATS}


def test_without_urgent_ones_their_seats_stay_empty(narrow: VllmEngine) -> None:
    most = {"long": 0, "all": 0}
    asyncio.run(together(narrow, 6, 0, most))
    assert most == {"long": SEATS, "all": SEATS}


def test_an_urgent_request_goes_first_after_a_group_too(narrow: VllmEngine) -> None:
    ended: list[str] = []

    async def one(name: str, spec: RequestSpec, **fields: Any) -> None:
        await narrow.run(name, spec, salt="salt", **fields)
        ended.append(name.partition("-")[0])

    async def everything() -> None:
        with narrow.core.held():  # type: ignore[union-attr]
            running = [
                asyncio.ensure_future(
                    one(f"group-{place}", request(LONG), group=Group("key", SEATS, place))
                )
                for place in range(SEATS)
            ]
            await asyncio.sleep(0)
            running += [
                asyncio.ensure_future(one(f"plain-{number}", request(20))) for number in range(20)
            ]
            await asyncio.sleep(0)
            running.append(asyncio.ensure_future(one("urgent", request(3), urgent=True)))
            for _ in range(3):
                await asyncio.sleep(0)
        await asyncio.gather(*running)

    asyncio.run(everything())
    assert ended == [*["group"] * SEATS, "urgent", *["plain"] * 20]


def streamed(engine: VllmEngine, spec: RequestSpec) -> tuple[Succeeded, list[Piece]]:
    pieces: list[Piece] = []
    outcome = asyncio.run(engine.run("stream", spec, salt="salt", on_piece=pieces.append))
    assert isinstance(outcome, Succeeded), outcome
    return outcome, pieces


def test_pieces_joined_are_the_outcome_and_what_runs_unstreamed(narrow: VllmEngine) -> None:
    rows = (Capture("rows", Site.resid_post, (0, 3)),)
    spec = request(9, logprobs=2, prompt_logprobs=1, captures=rows)
    outcome, pieces = streamed(narrow, spec)
    plain = run_alone(narrow, spec)
    assert isinstance(plain, Succeeded)
    (choice,) = outcome.choices
    assert len(pieces) == 9, "one for each step"
    assert "".join(piece.text for piece in pieces) == choice.text == plain.choices[0].text
    assert sum((piece.token_ids for piece in pieces), ()) == choice.token_ids
    assert choice.token_ids == plain.choices[0].token_ids
    logprobs = [value for piece in pieces for value in piece.token_logprobs or ()]
    assert logprobs == list(choice.token_logprobs or ())
    assert [piece.finish_reason for piece in pieces] == [*[None] * 8, "length"]
    assert pieces[0].prompt_logprobs == outcome.prompt_logprobs
    assert [piece.prompt_logprobs for piece in pieces[1:]] == [None] * 8
    for layer in (0, 3):
        ours, theirs = (each.captures[0].layers[layer] for each in (outcome, plain))
        assert np.allclose(ours, theirs, atol=1e-5)
    for each in (outcome, plain):
        each.release()


def test_each_choice_has_pieces_of_its_own(narrow: VllmEngine) -> None:
    outcome, pieces = streamed(narrow, request(5, n=3, temperature=1.0, seed=4))
    for choice in outcome.choices:
        own = [piece for piece in pieces if piece.choice == choice.index]
        assert sum((piece.token_ids for piece in own), ()) == choice.token_ids


def test_a_cancelled_stream_gives_every_token_that_was_made(narrow: VllmEngine) -> None:
    pieces: list[Piece] = []
    inside: list[Any] = []

    async def leave_after(count: int) -> None:
        enough = asyncio.Event()

        def take(piece: Piece) -> None:
            pieces.append(piece)
            if not inside:
                inside.extend(scheduler(narrow).requests.values())
            if len(pieces) == count:
                enough.set()

        task = asyncio.ensure_future(narrow.run("left", request(200), salt="salt", on_piece=take))
        await enough.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(leave_after(4))
    (left,) = inside
    made = left.num_output_tokens
    assert 4 <= made < 200
    assert sum(len(piece.token_ids) for piece in pieces) == made
    assert not scheduler(narrow).requests
