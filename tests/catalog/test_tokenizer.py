"""Token ids equal those of transformers, for whole models and for odd configurations."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from transformers import AutoTokenizer

from app.catalog import CatalogError, Tokenizer
from app.catalog.tokenizer import SLICE_TEXTS
from tests.catalog.conftest import bare_model
from worker.models.convert import PROBES

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def smol_pair(smollm2):
    return Tokenizer(smollm2), AutoTokenizer.from_pretrained(smollm2)


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_smollm2_tokenizes_as_in_transformers(smol_pair, text):
    ours, reference = smol_pair
    assert ours.encode(text) == reference.encode(text)
    plain = ours.encode(text, add_special_tokens=False)
    assert plain == reference.encode(text, add_special_tokens=False)
    assert ours.decode(plain) == reference.decode(plain)


@pytest.mark.parametrize("text", PROBES)
def test_smollm2_tokenizes_special_texts_as_in_transformers(smol_pair, text):
    ours, reference = smol_pair
    assert ours.encode(text) == reference.encode(text)


def test_smollm2_adds_no_bos(smol_pair):
    ours, _ = smol_pair
    assert ours.encode("") == []
    assert ours.bos_id == 1
    assert ours.encode("<|im_start|>") == [1]


@pytest.mark.parametrize("text", [*PROBES, "w3 w4 unknown w255", "<s> w9 </s>"])
def test_the_tiny_llama_tokenizes_as_in_transformers(tiny_llama, text):
    ours, reference = Tokenizer(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    assert ours.encode(text) == reference.encode(text)
    plain = reference.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=False) == plain
    assert ours.encode(text)[0] == ours.bos_id == reference.bos_token_id


def test_a_batch_gives_the_same_ids_in_order(smol_pair):
    ours, _ = smol_pair
    texts = [f"text number {number}" for number in range(SLICE_TEXTS + 3)]
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]
    assert ours.encode_batch([]) == []


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=5), add=st.booleans())
def test_places_have_the_ids_of_a_batch_and_the_offsets_of_transformers(smol_pair, texts, add):
    ours, reference = smol_pair
    batch = ours.encode_batch(texts, add_special_tokens=add)
    for text, ids in zip(texts, batch, strict=True):
        tokens = ours.encode_places(text, add_special_tokens=add)
        assert tokens.ids == ids
        wanted = reference(text, add_special_tokens=add, return_offsets_mapping=True)
        assert tokens.offsets == [tuple(pair) for pair in wanted["offset_mapping"]]


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_places_cover_a_text_in_order_when_no_byte_of_it_lacks_a_token(smol_pair, text):
    ours, _ = smol_pair
    tokens = ours.encode_places(text)
    # SmolLM2's vocabulary lacks some bytes that text seldom holds; it drops them.
    assume(ours.decode(tokens.ids) == text)
    covered = 0
    for start, end in tokens.offsets:
        assert start <= covered <= end
        assert start < end
        covered = end
    assert covered == len(text)


@pytest.mark.parametrize("text", [*PROBES, "w3 w4  unknown w255", "<s> w9 </s>", ""])
def test_the_tiny_llama_has_no_place_for_the_bos_that_it_adds(tiny_llama, text):
    ours, reference = Tokenizer(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    tokens = ours.encode_places(text)
    assert tokens.ids == ours.encode(text)
    assert tokens.offsets[0] is None
    wanted = reference(text, add_special_tokens=False, return_offsets_mapping=True)
    assert tokens.offsets[1:] == [tuple(pair) for pair in wanted["offset_mapping"]]
    assert ours.encode_places(text, add_special_tokens=False).offsets == tokens.offsets[1:]


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_the_old_bos_and_eos_flags_do_not_matter_as_in_transformers(tmp_path, add_bos, add_eos):
    folder = bare_model(tmp_path / "flags")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(folder).encode("a b") == [2, 3]
    assert AutoTokenizer.from_pretrained(folder).encode("a b") == [2, 3]


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_apply(tmp_path):
    folder = bare_model(tmp_path / "saved")
    core = Core.from_file(str(folder / "tokenizer.json"))
    core.enable_truncation(2)
    core.enable_padding(length=8)
    core.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).encode("a b a") == [2, 3, 2]


def test_a_broken_tokenizer_file_is_named(tmp_path):
    folder = bare_model(tmp_path / "broken")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CatalogError, match=r"tokenizer\.json"):
        Tokenizer(folder)


def test_tokens_that_only_the_configuration_knows_are_added_as_in_transformers(tmp_path):
    folder = bare_model(tmp_path / "added")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "added_tokens_decoder": {"4": {"content": "<mark>", "special": True, **flags}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(folder).encode("a<mark>b") == [2, 4, 3]
    assert AutoTokenizer.from_pretrained(folder).encode("a<mark>b") == [2, 4, 3]
