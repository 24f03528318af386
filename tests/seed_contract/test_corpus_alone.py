"""The corpus of bad requests, each sent by itself: a Completion breaks the rules that a Job does.

tests/corpus sends them inside of Jobs. Here `param` has no place of a request before it, and all
of Postgres is compared.
"""

import json
from typing import Any

import pytest

from tests.corpus.cases import Case, build, read_cases
from tests.corpus.test_corpus import check_envelope
from tests.fixtures.api import Api
from tests.seed_contract.unchanged import everything

# What only a Job refuses: it has no stream and no echo, and takes one prompt a request.
MAY_STREAM = ("stream: true", "stream_options", "echo in a Job", "prompt: two ")


def is_of_jobs(case: Case) -> bool:
    place, _, name = case.name.partition(": ")
    is_field = "custom_id" in case.data["request"] or place == "job/fields"
    return is_field or name.startswith(MAY_STREAM)


REQUESTS = [case for case in read_cases() if "request" in case.data]
ALONE = [case for case in REQUESTS if not is_of_jobs(case)]


class Single(Case):
    """A case whose param is that of the body."""

    @property
    def param(self) -> str | None:
        """The expected param of the error; only checked when the case names one."""
        return self.data.get("param")


@pytest.fixture(scope="module")
def names(shared_api: Api) -> dict[str, str]:
    """A vector of another account."""
    other = {"authorization": f"Bearer {shared_api.as_other()}"}
    body = {"activations": [7.0] * 8}
    answer = shared_api.client.post("/v1/steering_vectors", json=body, headers=other)
    return {"foreign_vector": answer.raise_for_status().json()["id"]}


@pytest.fixture(scope="module")
def before(shared_api: Api, names: dict[str, str]) -> dict[str, Any]:
    """What Postgres holds before the first of them, and after each."""
    assert names
    return everything(shared_api.database)


def test_nearly_all_of_the_corpus_is_about_single_requests_too() -> None:
    assert len(ALONE) > 0.9 * len(REQUESTS) > 700


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_a_bad_request_is_refused_by_itself_and_changes_nothing(
    shared_api: Api, names: dict[str, str], before: dict[str, Any], case: Case
) -> None:
    sent = {"model": "tiny", "prompt": "hi", **build(case.data["request"], names)}
    headers = {"content-type": "application/json"}
    answer = shared_api.client.post("/v1/completions", content=json.dumps(sent), headers=headers)
    check_envelope(answer, Single(case.name, case.data))
    assert everything(shared_api.database) == before
