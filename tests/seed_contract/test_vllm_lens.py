"""What vllm-lens serializes is taken as it is, and means the same."""

from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from app.completions.sent_vectors import VectorReader
from tests.fixtures.api import Api
from tests.fixtures.tiny_model import HIDDEN_SIZE
from tests.seed_contract.refused import PLAIN
from tests.seed_contract.vllm_lens_vectors import serialized

VECTORS = serialized()
TAKEN = [name for name in VECTORS if name != "float16"]


@pytest.mark.parametrize("name", TAKEN)
def test_its_tensors_hold_the_numbers_that_were_put_in(name: str) -> None:
    sent, numbers = VECTORS[name]
    reader = VectorReader({})
    vector = reader.read(reader.measure(sent["activations"]))
    assert vector.shape == np.shape(numbers)
    assert np.array_equal(vector.to_float32(), np.float32(numbers))


@pytest.mark.parametrize("name", [n for n in TAKEN if not n.startswith("wide")])
def test_its_vectors_keep_every_rule(strict_sdk: OpenAI, name: str) -> None:
    sent, numbers = VECTORS[name]
    assert np.shape(numbers)[-1] == HIDDEN_SIZE
    error = refused(strict_sdk, sent, max_tokens=3)
    assert (error.status_code, error.code) == (503, "no_worker"), "only a worker is missing"


def test_its_rules_are_ours_too(strict_sdk: OpenAI) -> None:
    sent, _ = VECTORS["positions"]
    error = refused(strict_sdk, sent)
    assert (error.param, error.code) == ("apply_steering_vectors", "invalid_request")
    assert "position 4" in str(error)


def test_float16_is_refused_with_what_to_send_instead(strict_sdk: OpenAI) -> None:
    error = refused(strict_sdk, VECTORS["float16"][0])
    assert error.param == "apply_steering_vectors"
    for part in ("torch.float16", '"float32" with "torch.float32"', "torch.bfloat16"):
        assert part in str(error)


def refused(sdk: OpenAI, vector: dict[str, Any], **fields: Any) -> openai.APIStatusError:
    body = {**PLAIN, **fields, "apply_steering_vectors": [vector]}
    with pytest.raises(openai.APIStatusError) as told:
        sdk.completions.create(model="tiny", prompt="", extra_body=body)
    assert isinstance(told.value, openai.BadRequestError | openai.InternalServerError)
    return told.value


def test_the_api_of_these_tests_has_no_worker(shared_api: Api) -> None:
    with shared_api.database.transaction() as conn:
        row = conn.execute("SELECT count(*) AS workers FROM workers").fetchone()
    assert row == {"workers": 0}
