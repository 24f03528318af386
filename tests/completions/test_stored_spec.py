"""A request's spec survives Postgres: jsonb writes 1e20 as a whole number, and nobody minds."""

import orjson
import pytest

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
