"""Negative controls: what the parity tests would say of an engine that is a little wrong.

The tolerance is worth something only if a small fault breaks it. Some faults are given to the
reference (then engine and reference must differ), some to the engine's own bookkeeping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.watching import steering_core
from tests.models.families import FAMILIES, HEAD_DIM, HEADS
from tests.parity.asked import Asked, Edit, Read
from tests.parity.comparing import Reference
from tests.parity.dimensions import FORMS, OPS, SITES, Combination
from tests.parity.draws import Dice, for_combination
from tests.parity.running import own_salt, run
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Errored, Succeeded

pytestmark = pytest.mark.slow

ROOMY = pytest.mark.parametrize("engine", [("llama", "roomy")], ids=["llama"], indirect=True)
TIGHT = pytest.mark.parametrize("engine", [("llama", "tight")], ids=["llama"], indirect=True)


def stronger(edit: Edit) -> Edit:
    """A little more of whatever the op does."""
    own = dict(edit.own)
    for name, more in {"scale": 0.002, "coeff": 0.01, "low": 0.02, "high": 0.02}.items():
        if own.get(name) is not None:
            own[name] += more
    grows = edit.op == "replace"
    return replace(edit, own=own, matrix=edit.matrix * np.float32(1.001 if grows else 1))


def later(edit: Edit) -> Edit:
    """One position later."""
    at = edit.at or {}
    return replace(edit, at={"spans": [[begin + 1, end + 1] for begin, end in at["spans"]]})


FAULTS: dict[str, Callable[[Edit], Edit]] = {
    "the next layer": lambda edit: replace(edit, layer=(edit.layer + 1) % 3),
    "the next position": later,
    "a little more": stronger,
    "the row before": lambda edit: replace(edit, matrix=np.roll(edit.matrix, 1, axis=0)),
    "one number a tenth off": lambda edit: replace(edit, matrix=nudged(edit.matrix)),
}


def nudged(matrix: np.ndarray) -> np.ndarray:
    moved = matrix.copy()
    moved[:, 8::HEAD_DIM] += 0.1  # one of each head
    return moved


def case(op: str, site: str, form: str = "spans") -> Asked:
    """Draw a request with one op whose matrix has several rows."""
    combination = Combination(op, site, form, "llama", "alone")
    asked = for_combination(combination, prompt=30, tokens=6)
    if op == "cap":  # bounds that no row keeps by chance
        asked = replace(asked, edits=(replace(asked.edits[0], own={"low": 1.5, "high": 1.5}),))
    return replace(asked, edits=tuple(map(_with_rows, asked.edits)))


def _with_rows(edit: Edit) -> Edit:
    rows = np.concatenate([edit.matrix, Dice(("more", edit.kind)).matrix(1, edit.matrix.shape[1])])
    return replace(edit, matrix=rows)


@ROOMY
def test_a_small_fault_in_any_op_at_any_site_is_seen(
    engine: VllmEngine, reference: Reference
) -> None:
    names = [(op, site) for op in OPS for site in SITES]
    asked = [case(*name) for name in names]
    outcomes = run(engine, asked).outcomes
    assert all(result.equal for result in reference.compare(asked, outcomes))
    unseen = []
    for fault, do in FAULTS.items():
        faulty = [replace(one, edits=(*one.edits[:-1], do(one.edits[-1]))) for one in asked]
        results = reference.compare(faulty, outcomes)
        unseen += [
            (fault, *name)
            for name, result in zip(names, results, strict=True)
            # Well over the tolerance, so that noise cannot hide it.
            if result.error < 3e-5
        ]
    assert not unseen


@ROOMY
def test_one_head_more_or_another_one_is_seen(engine: VllmEngine, reference: Reference) -> None:
    asked = []
    for op in OPS:
        one = case(op, "z")
        edits = tuple(replace(edit, heads=(1,)) for edit in one.edits)
        asked.append(replace(one, edits=edits))
    outcomes = run(engine, asked).outcomes
    assert all(result.equal for result in reference.compare(asked, outcomes))
    for heads in [(2,), (1, 2), None, tuple(range(HEADS))]:
        faulty = [
            replace(one, edits=(*one.edits[:-1], replace(one.edits[-1], heads=heads)))
            for one in asked
        ]
        assert not any(result.equal for result in reference.compare(faulty, outcomes)), heads


# What an off-by-one in reading a form would make of it, for a prompt of 30 and 6 tokens.
MISREAD: dict[str, Sequence[tuple[Any, Any]]] = {
    "all": [(None, {"exclude": [0]}), (None, {"exclude": [34]})],
    "positions": [({"positions": [4, 31]}, {"positions": [4, 32]})],
    "spans": [({"spans": [[3, 9]]}, {"spans": [[3, 10]]}), ({"spans": [[3, 9]]}, {"phase": "all"})],
    "prompt": [({"phase": "prompt"}, {"spans": [[0, end]]}) for end in (29, 31)],
    "generated": [({"phase": "generated"}, {"spans": [[begin, 35]]}) for begin in (29, 31)],
    "last": [({"phase": "last"}, {"spans": [[begin, 35]]}) for begin in (28, 30)],
    "steps": [
        ({"steps": [0, 2]}, {"spans": [[0, 30]]}),
        ({"steps": [1, 3]}, {"spans": [[31, 33]]}),
        ({"steps": [2, 4]}, {"steps": [2, 3]}),
    ],
    "exclude": [
        ({"exclude": [7]}, {"exclude": [8]}),
        ({"exclude": "special_tokens"}, None),
        ({"phase": "generated", "exclude": [33]}, {"phase": "generated"}),
    ],
}


@ROOMY
def test_an_off_by_one_in_any_form_is_seen(engine: VllmEngine, reference: Reference) -> None:
    assert set(MISREAD) == set(FORMS)
    pairs = [(form, *pair) for form, found in MISREAD.items() for pair in found]
    base = case("add", "resid_mid")
    base = replace(base, prompt=(0, *base.prompt[1:]))

    def with_at(at: dict[str, Any] | None) -> Asked:
        edit = base.edits[0]
        return replace(
            base,
            edits=(replace(edit, at=at, by_position="positions" in (at or {}), row=0),),
        )

    asked = [with_at(right) for _, right, _ in pairs]
    outcomes = run(engine, asked).outcomes
    assert all(result.equal for result in reference.compare(asked, outcomes))
    misread = [with_at(wrong) for _, _, wrong in pairs]
    unseen = [
        pair
        for pair, result in zip(pairs, reference.compare(misread, outcomes), strict=True)
        if result.error < 1e-3
    ]
    assert not unseen


@ROOMY
def test_what_a_capture_reads_is_told_from_what_is_next_to_it(
    engine: VllmEngine, reference: Reference
) -> None:
    base = case("add", "resid_post", "all")
    layer = base.edits[0].layer
    reads = [
        Read(f"read{number}", site, (layer,), {"spans": [[2, 20]]}, before, reduce)
        for number, (site, before, reduce) in enumerate(
            [
                ("resid_post", False, "none"),
                ("resid_post", True, "mean"),
                ("resid_mid", False, "norm"),
                ("attn_out", False, "mean"),
            ]
        )
    ]
    asked = [replace(base, reads=(read,)) for read in reads]
    outcomes = run(engine, asked).outcomes
    assert all(result.equal for result in reference.compare(asked, outcomes))
    changes: list[dict[str, Any]] = [{"layers": ((layer + 1) % 3,)}, {"site": "mlp_out"}]
    for change in changes:
        # The engine's answer under the other layer's name, as if it had mixed them up.
        named = [_renamed(outcome, change.get("layers", (layer,))[0]) for outcome in outcomes]
        faulty = [replace(one, reads=(replace(one.reads[0], **change),)) for one in asked]
        assert not any(result.equal for result in reference.compare(faulty, named)), change
    shifted = [
        replace(one, reads=(replace(one.reads[0], before=not one.reads[0].before),))
        for one in asked[:2]
    ]
    assert not any(result.equal for result in reference.compare(shifted, outcomes[:2]))


def _renamed(outcome: Any, layer: int) -> Any:
    assert isinstance(outcome, Succeeded)
    (capture,) = outcome.captures
    (rows,) = capture.layers.values()
    return replace(outcome, captures=(replace(capture, layers={layer: rows}),))


def wrong(asked: Sequence[Asked], outcomes: Sequence[Any], reference: Reference) -> list[bool]:
    """Say for each request whether its outcome is an error or not what it should be."""
    sound = [
        (one, outcome)
        for one, outcome in zip(asked, outcomes, strict=True)
        if isinstance(outcome, Succeeded)
    ]
    compared = iter(reference.compare(*map(list, zip(*sound, strict=True))) if sound else [])
    return [isinstance(outcome, Errored) or not next(compared).equal for outcome in outcomes]


@ROOMY
def test_without_salts_a_steered_request_takes_over_plain_blocks(
    engine: VllmEngine, reference: Reference
) -> None:
    combinations = [Combination(op, "resid_mid", "all", "llama", "cached") for op in OPS]
    asked = [for_combination(one, prompt=50, tokens=5) for one in combinations]
    # A layer whose successors read its keys and values.
    asked = [
        replace(one, edits=tuple(replace(edit, layer=0) for edit in one.edits)) for one in asked
    ]
    run(engine, [replace(one, edits=(), reads=()) for one in asked], salt=lambda _spec: "one")
    ran = run(engine, asked, salt=lambda _spec: "one")
    assert all(ran.seen.cached[key] > 0 for key in ran.keys)
    assert all(wrong(asked, ran.outcomes, reference))
    ran = run(engine, asked, salt=own_salt)
    assert not any(wrong(asked, ran.outcomes, reference))


@TIGHT
def test_positions_counted_within_a_chunk_are_seen(
    engine: VllmEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [unread(Dice(number), prompt=100, tokens=6) for number in range(4)]
    ran = run(engine, asked)
    assert all(ran.seen.chunks[key] > 1 for key in ran.keys)
    assert not any(wrong(asked, ran.outcomes, reference))
    core = steering_core(engine)
    prepare = core.prepare

    def from_zero(ids: Any, counts: np.ndarray, starts: np.ndarray) -> None:
        prepare(ids, counts, np.where(counts > 1, 0, starts).astype(starts.dtype))

    monkeypatch.setattr(core, "prepare", from_zero)
    ran = run(engine, [*asked, unread(Dice("short"), prompt=20, tokens=6)])
    *chunked, short = wrong(
        [*asked, unread(Dice("short"), prompt=20, tokens=6)], ran.outcomes, reference
    )
    assert all(chunked)
    assert not short


@TIGHT
def test_rows_counted_instead_of_placed_are_seen_after_a_preemption(
    engine: VllmEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = steering_core(engine)
    prepare = core.prepare
    counted: Counter[str] = Counter()

    def by_count(ids: Sequence[str], counts: np.ndarray, starts: np.ndarray) -> None:
        own = np.array([counted[name] for name in ids], dtype=starts.dtype)
        counted.update(dict(zip(ids, counts.tolist(), strict=True)))
        prepare(ids, counts, own)

    monkeypatch.setattr(core, "prepare", by_count)
    asked = [unread(Dice(number), prompt=20, tokens=24) for number in range(5)]
    ran = run(engine, asked)
    preempted = [ran.seen.preempted[key] > 0 for key in ran.keys]
    assert any(preempted)
    assert not all(preempted)
    assert wrong(asked, ran.outcomes, reference) == preempted


@ROOMY
def test_rows_given_to_the_wrong_request_are_seen(
    engine: VllmEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = steering_core(engine)
    prepare = core.prepare

    def turned(ids: Sequence[str], counts: np.ndarray, starts: np.ndarray) -> None:
        prepare(list(ids)[::-1], counts, starts)

    asked = [unread(Dice(number), prompt=20, tokens=5) for number in range(4)]
    monkeypatch.setattr(core, "prepare", turned)
    assert all(wrong(asked, run(engine, asked).outcomes, reference))
    assert wrong(asked[:1], run(engine, asked[:1]).outcomes, reference) == [False]


def unread(dice: Dice, *, prompt: int, tokens: int) -> Asked:
    """Draw a request with a strong steer at some positions and a capture of one layer."""
    width = FAMILIES["llama"].width
    ids = dice.prompt(prompt)
    places = [3, prompt // 2, prompt - 2, prompt + 2]
    return Asked(
        prompt=ids,
        tokens=tokens,
        edits=(
            Edit(
                "add",
                "resid_mid",
                1,
                dice.matrix(len(places), width),
                at={"positions": places},
                by_position=True,
                own={"scale": 3.0},
            ),
        ),
        reads=(Read("stream", "resid_post", (1, 2)),),
    )


NEUTRAL: dict[str, dict[str, Any]] = {
    "add of scale 0": {"op": "add", "own": {"scale": 0.0}},
    "norm_match of scale 0": {"op": "add", "own": {"scale": 0.0, "norm_match": True}},
    "orthogonal of coeff 1": {"op": "orthogonal", "own": {"coeff": 1.0}},
    "add of zeros": {"op": "add", "zeros": True},
    "norm_match of zeros": {"op": "add", "own": {"norm_match": True}, "zeros": True},
    "orthogonal of zeros": {"op": "orthogonal", "own": {"coeff": 0.0}, "zeros": True},
    "cap of zeros": {"op": "cap", "own": {"low": 1.0, "high": None}, "zeros": True},
}


@ROOMY
@pytest.mark.parametrize("site", SITES)
def test_what_changes_nothing_leaves_every_bit(engine: VllmEngine, site: str) -> None:
    dice = Dice(("neutral", site))
    width = FAMILIES["llama"].z_width if site == "z" else FAMILIES["llama"].width
    prompt = dice.prompt(25)
    reads = tuple(Read(f"at {place}", place, (0, 1, 2)) for place in SITES)
    plain = Asked(prompt, 6, reads=reads)
    (expected,) = run(engine, [plain]).outcomes
    assert isinstance(expected, Succeeded)
    for name, how in NEUTRAL.items():
        matrix = dice.matrix(1, width)
        if how.get("zeros"):
            matrix = np.zeros_like(matrix)
        edit = Edit(how["op"], site, 1, matrix, own=how.get("own", {}))
        (outcome,) = run(engine, [replace(plain, edits=(edit,))]).outcomes
        assert isinstance(outcome, Succeeded), (name, outcome)
        assert outcome.choices[0].token_ids == expected.choices[0].token_ids
        for one, other in zip(outcome.captures, expected.captures, strict=True):
            for layer, rows in one.layers.items():
                assert rows.tobytes() == other.layers[layer].tobytes(), (name, one.name, layer)
