"""A stored request is read as it was written or not at all.

What older code wrote lacks fields and is read; a field that this code does not know is refused
wherever it stands, because passing it over would be steering that silently does not happen.
"""

import copy
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import orjson
import pytest

from app.completions.spec import RequestSpec, Sampling, spec_from_json, spec_to_json
from app.steering.spec import (
    Capture,
    Direction,
    Intervention,
    NewerSpecError,
    Op,
    Reduce,
    Site,
    capture_from_json,
    intervention_from_json,
    to_json,
)

STEERED = Intervention(
    op=Op.orthogonal,
    site=Site.z,
    layer=1,
    vector="sv_a",
    row=2,
    scale=2.0,
    norm_match=True,
    positions=(1,),
    spans=((0, 2),),
    coeff=0.5,
    low=-1.0,
    high=1.0,
    heads=(0, 1),
    summed=True,
)
RUN = tuple(
    Intervention(Op.add, Site.resid_post, layer, "sv_b", layer, scale=3.0, norm_match=True)
    for layer in range(4)
)
READ = Capture(
    name="c",
    site=Site.mlp_out,
    layers=(0, 1),
    spans=((0, 2),),
    before=True,
    reduce=Reduce.project,
    directions=(Direction("sv_c", 1),),
    unit=True,
)
SAMPLING = Sampling(
    max_tokens=3,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    n=2,
    seed=5,
    stop=("x",),
    stop_token_ids=(9,),
    logprobs=1,
    prompt_logprobs=1,
    echo=True,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.5,
    logit_bias=((4, 1.0),),
    min_tokens=1,
    ignore_eos=True,
    allowed_token_ids=(1, 2),
    bad_words=("y",),
)
# Every field has a value that is written.
WHOLE = RequestSpec((1, 2, 3), "a text", SAMPLING, (STEERED, *RUN), (READ,), ("a warning",))


def stored() -> dict[str, Any]:
    """The whole request as Postgres gives it back."""
    written: dict[str, Any] = orjson.loads(orjson.dumps(spec_to_json(WHOLE)))
    return written


def objects(value: Any, place: str = "request") -> Iterator[tuple[str, dict[str, Any]]]:
    """List every object inside a stored value, with its place."""
    if isinstance(value, dict):
        yield place, value
        for key, inner in value.items():
            yield from objects(inner, f"{place}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from objects(inner, f"{place}[{number}]")


PLACES = [place for place, _ in objects(stored())]


def test_every_field_is_written_and_comes_back() -> None:
    data = stored()
    assert spec_from_json(data) == WHOLE
    assert set(data) == {field.name for field in fields(RequestSpec)}
    assert set(data["sampling"]) == {field.name for field in fields(Sampling)}
    one, run = data["interventions"]
    assert set(one) == {field.name for field in fields(Intervention)}
    assert {"layers", "row_step"} <= set(run)
    assert set(data["captures"][0]) == {field.name for field in fields(Capture)}
    assert set(data["captures"][0]["directions"][0]) == {field.name for field in fields(Direction)}
    assert [
        *("request", "request.sampling", "request.interventions[0]", "request.interventions[1]"),
        *("request.captures[0]", "request.captures[0].directions[0]"),
    ] == PLACES


@pytest.mark.parametrize("value", [None, False, 0, [], "x"])
@pytest.mark.parametrize("place", PLACES)
def test_a_field_of_newer_code_is_refused_wherever_it_stands(place: str, value: object) -> None:
    data = stored()
    dict(objects(data))[place]["of_newer_code"] = value
    with pytest.raises(NewerSpecError, match="of_newer_code"):
        spec_from_json(data)


@pytest.mark.parametrize("key", ["layers", "row_step"])
def test_what_stands_for_many_layers_is_part_of_no_single_intervention(key: str) -> None:
    data = stored()
    data["interventions"][0][key] = data["interventions"][1][key]
    if key == "layers":
        del data["interventions"][0]["layer"]
        data["interventions"][0]["row_step"] = 1
        assert len(spec_from_json(data).interventions) == 2 * len(RUN)
        return
    with pytest.raises(NewerSpecError, match=key):
        spec_from_json(data)


def test_the_readers_of_single_items_refuse_too() -> None:
    for item, read in ((STEERED, intervention_from_json), (READ, capture_from_json)):
        written = orjson.loads(orjson.dumps(to_json(item)))
        assert read(written) == item
        with pytest.raises(NewerSpecError, match="newer"):
            read({**written, "newer": None})


NEEDED = {
    "request": {"prompt_token_ids", "sampling"},
    "request.sampling": set(),
    "request.interventions[0]": {"op", "site", "layer", "vector", "row"},
    "request.interventions[1]": {"op", "site", "layers", "row_step", "vector", "row"},
    "request.captures[0]": {"name", "site", "layers"},
    "request.captures[0].directions[0]": {"vector"},
}


@pytest.mark.parametrize("place", PLACES)
def test_what_older_code_did_not_write_yet_has_its_default(place: str) -> None:
    whole = stored()
    found = dict(objects(whole))[place]
    for key in found.keys() - NEEDED[place]:
        data = copy.deepcopy(whole)
        del dict(objects(data))[place][key]
        assert spec_from_json(data) != WHOLE, f"{place}.{key} has a value that is not its default"
    bare = copy.deepcopy(whole)
    for key in found.keys() - NEEDED[place]:
        del dict(objects(bare))[place][key]
    assert isinstance(spec_from_json(bare), RequestSpec)
