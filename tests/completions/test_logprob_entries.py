"""How many alternatives one Completion may list: each choice lists those of its prompt again."""

from pathlib import Path
from typing import Any

import pytest

from app.catalog import Catalog, load_catalog
from app.completions.intake import PreparedCompletion, prepare_completion
from app.errors import InvalidRequestError
from app.settings import Limits
from tests.fixtures.tiny_model import write_tiny_model

PROMPT = [6, 7, 8]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return load_catalog(write_tiny_model(tmp_path))


def prepared(catalog: Catalog, entries_max: int, **body: Any) -> PreparedCompletion:
    return prepare_completion(
        {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **body},
        catalog.get("tiny"),
        catalog.tokenizer("tiny"),
        Limits(logprob_entries=entries_max),
        stored={},
        captured={},
    )


@pytest.mark.parametrize(
    ("body", "entries", "param"),
    [
        ({"n": 2, "prompt_logprobs": 9}, 2 * 3 * 10, "prompt_logprobs"),
        ({"n": 2, "logprobs": 0}, 2 * 4, "logprobs"),
        ({"logprobs": 4, "prompt_logprobs": 1}, 4 * 5 + 3 * 2, "prompt_logprobs"),
        ({"logprobs": 4, "echo": True}, (3 + 4) * 5, "logprobs"),
        ({"prompt": [PROMPT, PROMPT[:2]], "n": 3, "prompt_logprobs": 1}, 30, "prompt_logprobs"),
    ],
)
def test_the_limit_is_exact_and_named(
    catalog: Catalog, body: dict[str, Any], entries: int, param: str
) -> None:
    assert prepared(catalog, entries, **body).specs
    with pytest.raises(InvalidRequestError) as refused:
        prepared(catalog, entries - 1, **body)
    assert refused.value.param == param
    for part in (f"up to {entries} log-probabilities", f"at most {entries - 1} are", "Lower"):
        assert part in refused.value.message


def test_without_logprobs_nothing_counts(catalog: Catalog) -> None:
    assert prepared(catalog, 0, n=100).specs
