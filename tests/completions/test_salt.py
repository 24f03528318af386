"""The prefix-cache salt: whatever changes a cached row changes it, and nothing else does."""

from dataclasses import fields, replace
from typing import Any
from uuid import UUID

import pytest

from app.completions.salt import salt_for
from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import FOREVER, Capture, Intervention, Op, Site

ACCOUNT = UUID(int=1)
# An op of no kind in particular: every field has a value that is not its default.
ITEM = Intervention(
    op=Op.orthogonal,
    site=Site.z,
    layer=1,
    vector="sv_" + "a" * 64,
    row=2,
    scale=2.0,
    norm_match=True,
    positions=(1, 4),
    spans=((0, 3),),
    coeff=0.5,
    low=-1.0,
    high=1.0,
    heads=(0, 1),
    summed=True,
)
OTHER: dict[str, Any] = {
    "op": Op.cap,
    "site": Site.resid_post,
    "layer": 2,
    "vector": "sv_" + "b" * 64,
    "row": 3,
    "scale": 3.0,
    "norm_match": False,
    "positions": (1, 5),
    "spans": ((0, 4),),
    "coeff": 0.25,
    "low": -2.0,
    "high": 2.0,
    "heads": (1,),
    "summed": False,
}
EVERYWHERE = replace(ITEM, positions=None, spans=None)


def salt(*items: Intervention, account: UUID = ACCOUNT, prompt_tokens: int = 3, **spec: Any) -> str:
    request = RequestSpec(tuple(range(prompt_tokens)), None, Sampling(), items, **spec)
    return salt_for(account, request)


@pytest.mark.parametrize("name", [field.name for field in fields(Intervention)])
def test_every_field_of_an_intervention_changes_the_salt(name: str) -> None:
    assert OTHER.keys() == {field.name for field in fields(Intervention)}
    assert salt(replace(ITEM, **{name: OTHER[name]})) != salt(ITEM)


@pytest.mark.parametrize("name", ["positions", "spans", "coeff", "low", "high", "heads"])
def test_a_field_that_is_not_there_is_another_value(name: str) -> None:
    assert salt(replace(ITEM, **dict[str, Any]({name: None}))) != salt(ITEM)


def test_the_order_of_interventions_matters_and_so_does_their_number() -> None:
    second = replace(ITEM, op=Op.add)
    salts = {salt(ITEM), salt(second), salt(ITEM, second), salt(second, ITEM), salt(ITEM, ITEM)}
    assert len(salts) == 5


def test_equal_interventions_share_whatever_else_the_request_asks_for() -> None:
    reads = (Capture("a", Site.z, (1,)),)
    assert salt(ITEM) == salt(replace(ITEM), captures=reads)
    assert salt() == salt(captures=reads)


@pytest.mark.parametrize("items", [(), (ITEM,)], ids=["plain", "steered"])
def test_accounts_never_meet(items: tuple[Intervention, ...]) -> None:
    assert salt(*items) != salt(*items, account=UUID(int=2))


@pytest.mark.parametrize(
    "item",
    [
        replace(EVERYWHERE, spans=((5, FOREVER),)),
        replace(EVERYWHERE, positions=(0, 1)),
    ],
    ids=["spans", "positions"],
)
def test_the_length_of_the_prompt_matters_once_an_op_is_not_everywhere(item: Intervention) -> None:
    assert salt(item, prompt_tokens=3) != salt(item, prompt_tokens=4)
    assert salt(EVERYWHERE, item, prompt_tokens=3) != salt(EVERYWHERE, item, prompt_tokens=4)


def test_the_length_of_the_prompt_does_not_matter_when_every_op_is_everywhere() -> None:
    assert salt(prompt_tokens=3) == salt(prompt_tokens=4)
    assert salt(EVERYWHERE, prompt_tokens=3) == salt(EVERYWHERE, prompt_tokens=4)


@pytest.mark.parametrize(
    "nothing",
    [
        replace(ITEM, op=Op.add, scale=0.0),
        replace(ITEM, op=Op.add, scale=-0.0),
        replace(ITEM, coeff=1.0),
        replace(ITEM, spans=()),
        replace(ITEM, positions=()),
        replace(ITEM, heads=()),
    ],
    ids=["scale 0", "scale -0", "coeff 1", "no span", "no position", "no head"],
)
def test_what_changes_nothing_shares_with_plain_requests(nothing: Intervention) -> None:
    assert nothing.changes_nothing
    assert salt(nothing) == salt()
    assert salt(nothing, prompt_tokens=3) == salt(nothing, prompt_tokens=4)
    assert salt(EVERYWHERE, nothing) == salt(EVERYWHERE)


@pytest.mark.parametrize(
    "something",
    [
        replace(EVERYWHERE, op=Op.cap, scale=0.0, coeff=1.0),
        replace(EVERYWHERE, op=Op.replace, scale=0.0, coeff=1.0),
        replace(EVERYWHERE, scale=0.0),
        replace(EVERYWHERE, op=Op.add, coeff=1.0),
    ],
    ids=["cap", "replace", "orthogonal", "add"],
)
def test_fields_of_another_op_do_not_make_it_nothing(something: Intervention) -> None:
    assert salt(something) != salt()
