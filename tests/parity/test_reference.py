"""The reference itself: its sites agree with transformers and with each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.families import FAMILIES, HEAD_DIM, HEADS
from tests.parity.draws import Dice, sites_of
from tests.reference import process
from tests.reference.hooked import Passed
from tests.reference.ops import steer

TOKENS = [0, *range(3, 40), 1, *range(60, 80)]
POST_NORMED = ("gemma3", "olmo2")  # what attention gives is normed before it is added

Run = Callable[..., Passed]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(
    family: str, model_of: Callable[[str], Path], reference_process: ProcessPoolExecutor
) -> Run:
    """Run TOKENS through the family's model with edits."""

    def pass_with(*edits: dict[str, Any]) -> Passed:
        submitted = reference_process.submit(process.passed, model_of(family), TOKENS, list(edits))
        return submitted.result()

    return pass_with


def test_sites_add_up_and_agree_with_transformers(
    family: str, run: Run, model_of: Callable[[str], Path], reference_process: ProcessPoolExecutor
) -> None:
    facts = reference_process.submit(process.facts, model_of(family), TOKENS).result()
    at = run().after
    sites = sites_of(family)
    assert set(at) == {(site, layer) for site in sites for layer in range(FAMILIES[family].layers)}
    for layer in range(FAMILIES[family].layers):
        pre, post = at["resid_pre", layer], at["resid_post", layer]
        attn, mlp = at["attn_out", layer], at["mlp_out", layer]
        same(pre, facts["hidden"][layer])
        same(pre + attn + mlp, post)
        if "resid_mid" in sites:
            same(pre + attn, at["resid_mid", layer])
        if layer + 1 < FAMILIES[family].layers:
            same(post, facts["hidden"][layer + 1])
            same(post, at["resid_pre", layer + 1])
        assert at["z", layer].shape == (len(TOKENS), HEADS * HEAD_DIM)
        if family not in POST_NORMED:
            matrix, bias = facts["z_weights"][layer]
            same(at["z", layer] @ matrix + bias, attn)


def test_equal_steers_at_two_sites_give_equal_streams(family: str, run: Run) -> None:
    vector = Dice(family).matrix(1, FAMILIES[family].width)[0]
    steers = [(place, vector) for place in (0, 5, len(TOKENS) - 1)]
    pairs = [(("mlp_out", 0), ("resid_post", 0)), (("resid_post", 0), ("resid_pre", 1))]
    if "resid_mid" in sites_of(family):
        pairs.append((("attn_out", 1), ("resid_mid", 1)))
    for pair in pairs:
        edits = [
            {"op": "add", "scale": 2.0, "site": site, "layer": layer, "steers": steers}
            for site, layer in pair
        ]
        one, other = (run(edit) for edit in edits)
        same(one.logits, other.logits)
        plain = run()
        assert np.abs(one.logits[5:] - plain.logits[5:]).max() > 1e-3
        np.testing.assert_array_equal(one.before[pair[0]], plain.after[pair[0]])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in POST_NORMED])
def test_a_steer_of_one_head_moves_what_attention_gives_by_its_columns(
    family: str, run: Run, model_of: Callable[[str], Path], reference_process: ProcessPoolExecutor
) -> None:
    facts = reference_process.submit(process.facts, model_of(family), TOKENS).result()
    vector = Dice(("head", family)).matrix(1, HEADS * HEAD_DIM)[0]
    edit = {
        "op": "add",
        "scale": 1.0,
        "site": "z",
        "layer": 1,
        "steers": [(9, vector)],
        "heads": (2,),
        "head_dim": HEAD_DIM,
    }
    ran, plain = run(edit), run()
    part = slice(2 * HEAD_DIM, 3 * HEAD_DIM)
    moved = vector[part] @ facts["z_weights"][1][0][part]
    same(ran.after["attn_out", 1][9] - plain.after["attn_out", 1][9], moved, within=1e-4)


def test_ops_do_what_their_formulas_say() -> None:
    x = np.array([[3.0, 4.0, 0.0], [1.0, 1.0, 1.0]])
    v = np.array([0.0, 2.0, 0.0])
    base = {"steers": [(0, v)]}
    for edit, want in [
        ({"op": "add", "scale": 0.5}, [3, 5, 0]),
        ({"op": "add", "scale": 2.0, "norm_match": True}, [3, 14, 0]),
        ({"op": "orthogonal", "coeff": 0.0}, [3, 0, 0]),
        ({"op": "orthogonal", "coeff": -0.5}, [3, -2, 0]),
        ({"op": "cap", "low": None, "high": 1.5}, [3, 1.5, 0]),
        ({"op": "cap", "low": 5.0, "high": None}, [3, 5, 0]),
        ({"op": "cap", "low": 0.0, "high": 9.0}, [3, 4, 0]),
        ({"op": "replace"}, [0, 2, 0]),
    ]:
        np.testing.assert_allclose(steer(x, [base | edit]), [want, x[1]])
    summed = {"op": "add", "scale": 1.0, "norm_match": True, "summed": True} | base
    first = {"op": "add", "scale": 3.0} | base
    # The norm of the summed one is that of x as it came, although it is listed last.
    np.testing.assert_allclose(steer(x, [first, summed]), [[3, 15, 0], x[1]])
    after_first = steer(x, [first, summed | {"summed": False}])
    np.testing.assert_allclose(after_first[0, 1], 10 + np.sqrt(109))


def same(one: np.ndarray, other: np.ndarray, *, within: float = 1e-5) -> None:
    size = np.linalg.norm(other, axis=-1)
    assert (np.linalg.norm(one - other, axis=-1) <= within * size).all()
