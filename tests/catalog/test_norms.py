"""Typical norms: stored by a worker under the weights they belong to, shown by GET /v1/models."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.catalog import load_catalog
from app.catalog.norms import TypicalNorms, has_norms, store_norms
from app.catalog.tokenizer import Tokenizer
from tests.fixtures.api import api
from tests.fixtures.tiny_model import VOCAB_SIZE, write_tiny_model
from worker.engine.norms import SENTENCES, neutral_prompts

__all__ = ["api"]
NORMS = [1.5, 2.25, 3.0, 4.125]


@pytest.fixture
def model(tmp_path: Path):
    folder = tmp_path / "models"
    folder.mkdir()
    return load_catalog(write_tiny_model(folder)).get("tiny")


def test_norms_belong_to_name_revision_and_dtype(database, model):
    others = [replace(model, revision="another"), replace(model, dtype="bfloat16")]
    with database.transaction() as conn:
        assert not has_norms(conn, model)
        store_norms(conn, model, [9.0] * 4)
        store_norms(conn, model, NORMS)
        assert has_norms(conn, model)
        assert not any(has_norms(conn, other) for other in others)
    norms = TypicalNorms(database)
    assert norms.of(model) == tuple(NORMS)
    assert [norms.of(other) for other in others] == [None, None]


def test_a_model_shows_its_norms_once_they_are_known(api, model):
    assert api.client.get("/v1/models/tiny").json()["capabilities"]["typical_norms"] is None
    with api.database.transaction() as conn:
        store_norms(conn, model, NORMS)
    api.client.app.state.norms = TypicalNorms(api.database)
    assert api.client.get("/v1/models/tiny").json()["capabilities"]["typical_norms"] == NORMS
    (listed,) = api.client.get("/v1/models").json()["data"]
    assert listed["capabilities"]["typical_norms"] == NORMS


def test_prompts_are_sentences_or_any_tokens(model):
    encode = Tokenizer(model.tokenizer_path).encode
    prompts = neutral_prompts(encode, vocab_size=VOCAB_SIZE, max_model_len=32)
    assert len(prompts) == len(SENTENCES)
    assert {len(prompt) for prompt in prompts} == {31}
    (alone,) = neutral_prompts(lambda _text: [0, *[2] * 8], vocab_size=300, max_model_len=8192)
    assert len(alone) == 64
    assert len(set(alone)) == 64
    assert max(alone) < 300
