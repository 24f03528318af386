"""schemathesis over the whole document, stateful links on, against a running service.

50 examples an operation in the suite, from one seed. By hand, with a new seed each time:
TILLER_SCHEMATHESIS_EXAMPLES=500 pytest tests/openapi_fuzz; TILLER_SCHEMATHESIS_SEED repeats one.
With TILLER_SCHEMATHESIS_ENGINE=vllm a real worker runs what is drawn, on a tiny random model.
"""

import os
import random
import sys

import pytest

from tests.openapi_fuzz.narrowed import narrowed, streams_alone, with_model
from tests.openapi_fuzz.runs import Seen, run
from tests.openapi_fuzz.service import ON_VLLM, Service, stored_vector

EXAMPLES = 50
SEED = 20
BY_HAND = os.environ.get("TILLER_SCHEMATHESIS_EXAMPLES")
# Answers below 400 that a run must see; chat is never offered.
REFUSED_ALWAYS = {"POST /v1/chat/completions"}

STREAMS_MIN = 10

pytestmark = pytest.mark.timeout(7200 if BY_HAND or ON_VLLM else 300)


@pytest.fixture(scope="module")
def seen(service: Service) -> Seen:
    """One run over the whole document."""
    asked = os.environ.get("TILLER_SCHEMATHESIS_SEED")
    seed = int(asked) if asked else random.getrandbits(32) if BY_HAND else SEED
    found = Seen(seed)
    document, examples = service.app.openapi(), int(BY_HAND or EXAMPLES)
    run(service, with_model(document), found, phases={"coverage"}, examples=examples)
    with service.client() as client:
        assert stored_vector(client) == service.vector_id  # it may have been found and deleted
    runs = narrowed(document, job_id=service.job_id, path=service.path, vector_id=service.vector_id)
    run(service, runs, found, phases={"fuzzing", "stateful"}, examples=examples)
    run(service, streams_alone(runs), found, phases={"fuzzing"}, examples=examples)
    sys.stdout.write(found.table())  # shown by -s, and when a test fails
    return found


def test_no_answer_breaks_what_the_document_says(seen: Seen) -> None:
    assert not seen.failures, seen.report()


def test_every_operation_was_asked_and_did_its_work(service: Service, seen: Seen) -> None:
    operations = {
        f"{method.upper()} {path}"
        for path, methods in service.app.openapi()["paths"].items()
        for method in methods
    }
    assert seen.answers.keys() == operations
    worked = {name for name, found in seen.answers.items() if any(code < 400 for code in found)}
    assert operations - worked == REFUSED_ALWAYS


def test_runs_walked_from_answer_to_answer(seen: Seen) -> None:
    # Which links a run takes is drawn; test_links.py follows every one.
    assert len(seen.links) >= 5, seen.table()


def test_streams_were_read_to_their_end(seen: Seen) -> None:
    assert seen.streams["whole"] >= STREAMS_MIN, seen.table()


def test_nothing_is_left_open_and_every_token_is_accounted_for(
    service: Service, seen: Seen
) -> None:
    assert seen.requests
    service.check()
