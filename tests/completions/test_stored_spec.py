"""A request's spec survives Postgres: jsonb writes 1e20 as a whole number, and nobody minds."""

from dataclasses import replace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.completions.spec import RequestSpec, Sampling, spec_from_json, spec_to_json
from app.kit.db import Database
from app.results.rows import steering_json
from app.steering.spec import Capture, Intervention, Op, Site


@pytest.mark.parametrize("scale", [0.0, 1.0, -2.5, 9e18, 2.0**64, 1e20, -3e38, 1e-30])
def test_a_spec_comes_back_as_it_was_and_can_be_written_into_results(
    database: Database, scale: float
) -> None:
    spec = RequestSpec(
        prompt_token_ids=(1, 2, 3),
        prompt="a text",
        sampling=Sampling(max_tokens=4, temperature=1.0, logit_bias=((5, -100.0),), stop=("x",)),
        interventions=(
            Intervention(Op.add, Site.resid_post, 1, "sv_a", 0, scale=scale, spans=((0, 2),)),
        ),
        captures=(Capture("residual_stream", Site.resid_post, (0, 1)),),
    )
    written = orjson.dumps(spec_to_json(spec)).decode()
    with database.transaction() as conn:
        row = conn.execute("SELECT %s::jsonb AS spec", [written]).fetchone()
    assert row is not None
    read = spec_from_json(row["spec"])
    assert read == spec
    assert isinstance(read.interventions[0].scale, float)
    listed = steering_json(read)
    assert listed is not None
    assert float(orjson.loads(listed)[0]["scale"]) == scale


ITEM = Intervention(Op.cap, Site.z, 0, "sv_a", 0, low=0.5, heads=(0, 1))
OTHER = replace(ITEM, low=None, high=1.0)


@pytest.mark.parametrize(
    ("items", "written"),
    [
        ([], 0),
        ([ITEM], 1),
        ([replace(ITEM, layer=layer) for layer in range(30)], 1),
        ([replace(ITEM, layer=layer, row=29 - layer) for layer in range(30)], 1),
        ([replace(ITEM, layer=layer, row=3 * layer + 2) for layer in (5, 1, 9)], 2),
        ([replace(ITEM, layer=layer, row=row) for layer, row in [(1, 0), (2, 1), (3, 5)]], 2),
        ([replace(ITEM, layer=1), OTHER, replace(ITEM, layer=2)], 3),
        ([replace(item, layer=layer) for item in (ITEM, OTHER) for layer in range(4)], 2),
        ([ITEM, ITEM], 1),
        ([replace(ITEM, positions=(1, 4)), replace(ITEM, spans=((0, 2),))], 2),
    ],
)
def test_interventions_that_differ_in_the_layer_alone_are_written_as_one(
    items: list[Intervention], written: int
) -> None:
    spec = RequestSpec((1,), None, Sampling(), interventions=tuple(items))
    data = orjson.loads(orjson.dumps(spec_to_json(spec)))
    assert len(data.get("interventions", [])) == written
    assert spec_from_json(data) == spec


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            lambda item, layer, row: replace(item, layer=layer, row=row),
            st.sampled_from([ITEM, OTHER]),
            st.integers(0, 3),
            st.integers(0, 3),
        )
    )
)
def test_any_list_of_interventions_comes_back_as_it_was(items: list[Intervention]) -> None:
    spec = RequestSpec((1,), None, Sampling(), interventions=tuple(items))
    assert spec_from_json(orjson.loads(orjson.dumps(spec_to_json(spec)))) == spec
