"""Which requests of a Job are shown as samples, also where its baselines come last."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.admin import sample_texts
from app.admin.sample_texts import Pair, choose
from app.completions.spec import RequestSpec
from app.jobs.records import Job
from app.steering.spec import Intervention, Op, Site
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders, a_spec

PROMPTS = 500  # more than are looked at first


def asked(prompt: int, scale: float) -> RequestSpec:
    """Describe a request with a prompt of its own."""
    spec = replace(a_spec(), prompt_token_ids=(prompt, 1, 2))
    item = Intervention(
        op=Op.add, site=Site.resid_post, layer=1, vector="sv_" + "ab" * 32, row=0, scale=scale
    )
    return replace(spec, interventions=(item,))


def a_sweep(dashboard: Dashboard, specs: Sequence[RequestSpec]) -> Job:
    """Make a Job whose requests have all succeeded."""
    job = Builders(dashboard.database).a_job(specs=specs)
    with dashboard.database.transaction() as conn:
        conn.execute(
            """
            UPDATE requests SET state = 'succeeded', completion_tokens = 2, attempt = 1,
                finished_at = now() WHERE job_id = %s
            """,
            [job.id],
        )
    return job


def chosen(dashboard: Dashboard, job: Job) -> list[Pair]:
    with dashboard.database.transaction() as conn:
        return choose(conn, job.id, job.n_total)


@pytest.mark.parametrize("scales", [(-4.0, 0.0), (0.0, 4.0), (-4.0, 4.0, 0.0)])
def test_a_sweep_in_order_of_strength_shows_each_prompt_beside_its_baseline(
    dashboard: Dashboard, scales: tuple[float, ...]
):
    specs = [asked(prompt, scale) for scale in scales for prompt in range(PROMPTS)]
    pairs = chosen(dashboard, a_sweep(dashboard, specs))
    assert len(pairs) == sample_texts.SAMPLES_MAX
    for baseline, steered in pairs:
        assert baseline is not None
        assert steered is not None
        assert baseline.is_baseline
        assert not steered.is_baseline
        assert baseline.spec.prompt_token_ids == steered.spec.prompt_token_ids


def test_a_prompt_that_never_comes_again_is_shown_alone(dashboard: Dashboard):
    specs = [asked(number, 4.0 if number < PROMPTS else 0.0) for number in range(2 * PROMPTS)]
    pairs = chosen(dashboard, a_sweep(dashboard, specs))
    assert [baseline for baseline, _ in pairs] == [None] * sample_texts.SAMPLES_MAX


@pytest.mark.parametrize("total", [1, 400, 997, 2000, 200_000])
def test_the_places_that_are_looked_at_are_bounded_and_inside_the_job(total: int):
    places = sample_texts._places(range(sample_texts.SAMPLES_MAX), total)
    assert len(places) == len(set(places)) <= sample_texts.PROBES_MAX
    assert all(sample_texts.LOOKED_AT_MAX <= place < total for place in places)
    assert bool(places) == (total >= 800 and total != 997)
