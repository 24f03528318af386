"""POST /v1/jobs with `reproducible: true`: how it is cut, seeded, stored and shown."""

from typing import Any

import pytest

from app.completions.spec import RequestSpec, Sampling
from app.jobs.intake import with_fixed_seed
from tests.fixtures.api import Api


def rows(api: Api, query: str) -> list[dict[str, Any]]:
    with api.database.transaction() as conn:
        return list(conn.execute(query))  # type: ignore[call-overload]


def shards(api: Api) -> list[tuple[int, int]]:
    found = rows(api, "SELECT first_index, end_index FROM shards ORDER BY first_index")
    return [(row["first_index"], row["end_index"]) for row in found]


def sampling(api: Api) -> list[dict[str, Any]]:
    found = rows(api, "SELECT spec FROM requests ORDER BY request_index, job_id")
    return [row["spec"]["sampling"] for row in found]


def test_a_reproducible_job_says_so_and_is_cut_into_fixed_groups(api: Api) -> None:
    answer = api.submit(*[{"prompt": "hi"}] * 70, reproducible=True)
    assert answer.status_code == 202
    assert answer.json()["reproducible"] is True
    assert api.client.get(f"/v1/jobs/{answer.json()['id']}").json()["reproducible"] is True
    assert shards(api) == [(0, 32), (32, 64), (64, 70)]


@pytest.mark.parametrize("fields", [{}, {"reproducible": False}, {"reproducible": None}])
def test_other_jobs_are_cut_by_work_whatever_they_say(api: Api, fields: dict[str, object]) -> None:
    answer = api.submit(*[{"prompt": "hi"}] * 70, **fields)
    assert answer.json()["reproducible"] is False
    assert shards(api) == [(0, 70)]


def test_groups_do_not_depend_on_how_fast_workers_were(api: Api) -> None:
    with api.database.transaction() as conn:
        conn.execute(
            """
            INSERT INTO workers (id, model, model_revision, dtype, host, pid, state,
                tokens_per_second)
            VALUES (gen_random_uuid(), 'tiny', 'revision-1', 'float32', 'localhost', 1, 'ready',
                0.1)
            """
        )
    api.submit(*[{"prompt": "hi"}] * 64, reproducible=True)
    assert shards(api) == [(0, 32), (32, 64)]


def test_requests_that_draw_without_a_seed_get_one_of_their_index(api: Api) -> None:
    requests = [
        {"prompt": "hi"},
        {"prompt": "hi", "temperature": 0},
        {"prompt": "hi", "seed": 5},
        {"prompt": "hi", "n": 3},
    ]
    for _ in range(2):
        assert api.submit(*requests, reproducible=True).status_code == 202
    first, greedy, own, several = first_job = sampling(api)[0::2]
    assert sampling(api)[1::2] == first_job, "the same Job, the same seeds"
    assert "seed" not in greedy
    assert own["seed"] == 5
    assert first["seed"] != several["seed"]


def test_requests_of_other_jobs_keep_having_no_seed(api: Api) -> None:
    api.submit({"prompt": "hi"})
    assert sampling(api) == [{}]


def test_fixed_seeds_are_far_apart_so_that_choices_do_not_share_them() -> None:
    spec = RequestSpec((1,), None, Sampling())
    seeds = [with_fixed_seed(spec, index).sampling.seed or 0 for index in range(2000)]
    assert seeds[0] == with_fixed_seed(spec, 0).sampling.seed
    drawn = {seed + choice for seed in seeds for choice in range(128)}
    assert len(drawn) > 0.999 * 2000 * 128
    assert all(0 <= seed < 2**31 for seed in seeds)
