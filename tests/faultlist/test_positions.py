"""An op acts at its absolute positions and nowhere else, in prompt and generated text alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from app.steering.spec import FOREVER, Capture, Site, Spans
from tests.engine.engines import run_alone, run_together
from tests.faultlist.asking import (
    LAST,
    SAME,
    add,
    moved,
    numbers_of,
    prompt_of,
    request,
    rows_of,
    succeeded,
    tokens_of,
    vector,
)
from worker.engine.vllm_engine import VllmEngine
from worker.steering.core import SteeringCore

P, M = 6, 5
RAN = range(P + M - 1)


def test_a_vector_at_position_0_acts_once_and_not_at_each_generated_token(
    engine: VllmEngine,
) -> None:
    first = add(vector(engine), positions=(0,))
    assert moved(engine, request(prompt_of(P), first, max_tokens=M)) == {0}


def test_a_vector_at_a_generated_position_acts_there(engine: VllmEngine) -> None:
    inside = add(vector(engine), positions=(P + 1,))
    assert moved(engine, request(prompt_of(P), inside, max_tokens=M)) == {P + 1}


def test_a_vector_without_positions_acts_on_every_row_that_runs(engine: VllmEngine) -> None:
    assert moved(engine, request(prompt_of(P), add(vector(engine)), max_tokens=M)) == set(RAN)


@pytest.mark.parametrize("prompt", [1, 2, 6, 33])
@pytest.mark.parametrize("form", ["first", "prompt", "generated", "last", "step_2", "holes", "end"])
def test_spans_act_on_exactly_their_rows(engine: VllmEngine, prompt: int, form: str) -> None:
    reach = prompt + M - 1
    spans: Spans = {
        "first": ((0, 1),),
        "prompt": ((0, prompt),),
        "generated": ((prompt, FOREVER),),
        "last": ((prompt - 1, FOREVER),),
        "step_2": ((prompt + 1, prompt + 2),),
        "holes": ((0, 1), (prompt, prompt + 1), (prompt + 2, FOREVER)),
        "end": ((reach - 1, FOREVER),),
    }[form]
    wanted = {row for start, end in spans for row in range(start, min(end, reach))}
    spec = request(prompt_of(prompt), add(vector(engine), spans=spans), max_tokens=M)
    assert moved(engine, spec) == wanted


def test_each_position_takes_its_own_row_and_repeated_ones_add_up(engine: VllmEngine) -> None:
    name = vector(engine, rows=3)
    spec = request(prompt_of(P), add(name, positions=(P + 1, 2, P + 1), scale=0.5), max_tokens=M)
    plain, steered = run_together(engine, [replace(spec, interventions=()), spec])
    rows = numbers_of(engine, name)
    change = rows_of(steered) - rows_of(plain)
    assert np.allclose(change[2], 0.5 * rows[1], atol=SAME)
    assert np.allclose(change[P + 1], 0.5 * (rows[0] + rows[2]), atol=SAME)
    assert np.abs(np.delete(change, [2, P + 1], axis=0)).max() <= SAME


def test_a_capture_that_begins_or_ends_within_generated_text_has_its_rows(
    engine: VllmEngine,
) -> None:
    everything = Capture("rows", Site.resid_post, (LAST,))
    windows = (((P + 1, P + 3),), ((P + 2, FOREVER),), ((0, 1), (P, P + 1)))
    captures = (
        everything,
        *(replace(everything, name=f"w{i}", spans=spans) for i, spans in enumerate(windows)),
    )
    outcome = run_alone(engine, request(prompt_of(P), captures=captures, max_tokens=M))
    rows, *found = (rows_of(outcome, capture=index) for index in range(4))
    for spans, window in zip(windows, found, strict=True):
        wanted = [row for start, end in spans for row in range(start, min(end, P + M - 1))]
        assert np.array_equal(window, rows[wanted])


def test_a_row_that_becomes_infinite_errors_its_request_where_no_token_would_show_it(
    engine: VllmEngine,
) -> None:
    huge = add(vector(engine, size=1e38), positions=(0,), scale=1e3)
    outcome = run_alone(engine, request(prompt_of(P), huge, captures=()))
    assert getattr(outcome, "code", None) == "non_finite_activations"


# The text that comes out tells the fault of rows 1 and 2 apart from the right thing: what acts on
# position 0 of the last layer changes no token, what acts on position P + 1 changes the third.


def test_the_text_shows_positions_at_their_place(engine: VllmEngine) -> None:
    plain, at_start, inside = greedy_texts(engine)
    assert at_start == plain
    assert inside[:2] == plain[:2]
    assert inside[2] != plain[2]


def test_with_positions_counted_from_each_step_the_text_shows_both_faults(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SteeringCore, "prepare", counted_from_each_step(SteeringCore.prepare))
    plain, at_start, inside = greedy_texts(engine)
    assert at_start[0] == plain[0]
    assert at_start[1:] != plain[1:]  # steered at every generated token
    assert inside == plain  # never steered


def greedy_texts(engine: VllmEngine) -> tuple[tuple[int, ...], ...]:
    """Run plain, steered at position 0, steered at position P + 1; one after the other."""
    strong = vector(engine, size=200.0)
    specs = [
        request(prompt_of(P), *ops, captures=(), forced=False, max_tokens=M)
        for ops in ((), (add(strong, positions=(0,)),), (add(strong, positions=(P + 1,)),))
    ]
    return tuple(tokens_of(run_alone(engine, spec)) for spec in specs)


def counted_from_each_step(prepare: Callable[..., None]) -> Callable[..., None]:
    def relative(self, request_ids, counts, starts):
        prepare(self, request_ids, counts, np.zeros_like(starts))

    return relative


def test_a_missing_row_is_never_passed_off_as_a_whole_capture(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = request(prompt_of(P), add(vector(engine)), max_tokens=M)
    assert len(rows_of(succeeded(run_alone(engine, spec)))) == P + M - 1
    monkeypatch.setattr(SteeringCore, "prepare", counted_from_each_step(SteeringCore.prepare))
    outcome = run_alone(engine, spec)
    assert getattr(outcome, "code", None) == "activation_rows_mismatch"
