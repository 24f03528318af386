"""Encoding within a context: the ids of what fits, and little spent on what does not."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.catalog import Tokenizer, TooMany
from app.catalog.tokenizer import PIECE_CHARS_MIN, SLICE_CHARS, SLICE_TEXTS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


class Counted:
    """Counts the characters that go through a tokenizer of the library, call by call."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.sizes: list[int] = []

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.sizes.append(sum(map(len, texts)))
        return self._core.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


@pytest.fixture(scope="module")
def smol(smollm2):
    return Tokenizer(smollm2)


@pytest.fixture
def counted(smol, monkeypatch):
    counter = Counted(smol._core)
    monkeypatch.setattr(smol, "_core", counter)
    return counter


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXT, max_size=5), most=st.integers(0, 20), add=st.booleans())
def test_texts_that_fit_have_their_ids_and_others_their_number(smol, texts, most, add):
    whole = smol.encode_batch(texts, add_special_tokens=add)
    within = smol.encode_within(texts, most, add_special_tokens=add)
    for ids, found in zip(whole, within, strict=True):
        wanted = ids if len(ids) <= most else TooMany(len(ids), is_exact=True)
        assert found == wanted


@pytest.mark.parametrize("unit", ["x y", "\u3042", "antidisestablishmentarianism ", "\n"])
def test_a_very_long_text_is_counted_until_it_has_too_many(smol, counted, unit):
    text = unit * (4_000_000 // len(unit))
    (found,) = smol.encode_within([text], 2000)
    assert isinstance(found, TooMany)
    assert not found.is_exact
    assert found.tokens > 2000
    assert max(counted.sizes) <= PIECE_CHARS_MIN
    assert sum(counted.sizes) < 60 * PIECE_CHARS_MIN


@pytest.mark.parametrize("unit", [" responsibilities", " " * 64])
def test_a_long_text_that_fits_after_all_has_its_ids(smol, counted, unit):
    text = unit * (20 * PIECE_CHARS_MIN // len(unit))  # far more than 8 characters a token
    (ids,) = smol.encode_batch([text])
    count = len(ids)
    counted.sizes.clear()
    assert smol.encode_within([text, "hi"], count) == [ids, *smol.encode_batch(["hi"])]
    assert sum(counted.sizes) >= 2 * len(text), "it was counted in pieces before"
    assert smol.encode_within([text], count - 1) == [TooMany(count, is_exact=True)]
    (found,) = smol.encode_within([text], count // 2)
    assert isinstance(found, TooMany)
    assert count // 2 < found.tokens < count


def test_a_word_that_the_vocabulary_lacks_is_one_token_however_long_it_is(tiny_llama):
    words = Tokenizer(tiny_llama)
    text = "w3 " + "unknown" * PIECE_CHARS_MIN
    assert words.encode_within([text, "w4"], 5) == words.encode_batch([text, "w4"])


def test_a_batch_goes_through_in_slices_of_bounded_size(smol, counted):
    texts = ["some words " * 1000] * 400 + ["hi"] * (SLICE_TEXTS + 3) + ["x " * SLICE_CHARS, "end"]
    whole = smol.encode_batch(texts)
    assert max(counted.sizes[:-2]) <= SLICE_CHARS
    assert sum(counted.sizes) == sum(map(len, texts))
    assert len(whole) == len(texts)
    assert whole[0] == smol.encode_batch(texts[:1])[0]
