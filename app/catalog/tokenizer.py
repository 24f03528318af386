"""Text to token ids and back, with the `tokenizers` library alone.

The ids equal those of transformers' AutoTokenizer, which would bring torch into the API (a test
compares the two). As there, tokenizer.json decides about BOS and EOS, and the older flags
add_bos_token and add_eos_token of tokenizer_config.json do not. The underlying
tokenizer is never changed after it was built and releases the interpreter's lock, so threads
share one.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from app.catalog.models_file import CatalogError

# A batch runs on all cores at once and its intermediate objects are about 100 times larger than
# the ids, so a Job's prompts go through in slices.
SLICE_TEXTS = 4096
SLICE_CHARS = 1024 * 1024
# A text that is longer than this many characters for each token that is allowed, is counted piece
# by piece before it may be encoded whole.
CHARS_PER_TOKEN = 8
PIECE_CHARS_MIN = 16 * 1024
CUT_TOKENS = 16  # more tokens than a cut in a text makes


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as its tokens; `ids` and `offsets` run side by side.

    An offset is [start, end) in characters of the text. Tokens that share one character have
    offsets that overlap there. A character whose bytes the vocabulary lacks is dropped, and the
    offsets beside it are the library's guess. None stands for an added token: BOS or EOS.
    """

    ids: list[int]
    offsets: list[tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class TooMany:
    """A text of more tokens than were allowed: so many, or at least so many."""

    tokens: int
    is_exact: bool


class Tokenizer:
    """The tokenizer of one model."""

    def __init__(self, folder: Path) -> None:
        """Load `folder`/tokenizer.json. Raises CatalogError when it cannot be used."""
        file = folder / "tokenizer.json"
        try:
            self._core = tokenizers.Tokenizer.from_file(str(file))
        # The library raises bare Exception for a missing and for a malformed file.
        except Exception as error:
            msg = f"{file} cannot be read as a tokenizer: {error}"
            raise CatalogError(msg) from error
        # Files saved after training may carry both; they are no part of the tokenization.
        self._core.no_truncation()
        self._core.no_padding()
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
        _apply_added_tokens(self._core, config)
        bos = _text(config.get("bos_token"))
        self.bos_id: int | None = None if bos is None else self._core.token_to_id(bos)
        self.size = self._core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids; `add_special_tokens` adds the BOS or EOS that the model has."""
        ids: list[int] = self._core.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Turn many texts into token ids, on all cores; the order is kept."""
        ids: list[list[int]] = []
        for part in _slices(texts):
            encoded = self._core.encode_batch_fast(part, add_special_tokens=add_special_tokens)
            ids.extend(item.ids for item in encoded)
        return ids

    def encode_within(
        self, texts: Sequence[str], tokens_max: int, *, add_special_tokens: bool = True
    ) -> list[list[int] | TooMany]:
        """Turn texts into token ids as `encode_batch` does, but none of more than `tokens_max`.

        Work and memory are those of texts that fit, however long a text is.
        """
        chars_max = max(PIECE_CHARS_MIN, CHARS_PER_TOKEN * tokens_max)
        too_long = {
            place: found
            for place, text in enumerate(texts)
            if len(text) > chars_max
            and (found := self._count_pieces(text, chars_max, tokens_max)) is not None
        }
        rest = [text for place, text in enumerate(texts) if place not in too_long]
        encoded = self._encode_rest(
            rest if too_long else texts, tokens_max, add_special_tokens=add_special_tokens
        )
        if not too_long:
            return list(encoded)
        return [too_long.get(place) or next(encoded) for place in range(len(texts))]

    def _encode_rest(
        self, texts: Sequence[str], tokens_max: int, *, add_special_tokens: bool
    ) -> Iterator[list[int] | TooMany]:
        for part in _slices(texts):
            for item in self._core.encode_batch_fast(part, add_special_tokens=add_special_tokens):
                count = len(item)
                yield item.ids if count <= tokens_max else TooMany(count, is_exact=True)

    def _count_pieces(self, text: str, chars: int, tokens_max: int) -> TooMany | None:
        """Count a long text until it has too many tokens; None when it may fit after all."""
        tokens = 0
        for start in range(0, len(text), chars):
            piece = text[start : start + chars]
            (encoded,) = self._core.encode_batch_fast([piece], add_special_tokens=False)
            tokens += len(encoded) - CUT_TOKENS
            if tokens > tokens_max:
                return TooMany(tokens, is_exact=False)
        return None

    def encode_places(self, text: str, *, add_special_tokens: bool = True) -> Tokens:
        """Turn text into token ids, and say which characters each token stands for."""
        encoding = self._core.encode(text, add_special_tokens=add_special_tokens)
        places = zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
        return Tokens(encoding.ids, [None if added else offset for offset, added in places])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Turn token ids into text."""
        text: str = self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """Name a token as the vocabulary writes it; None when there is no such id."""
        name: str | None = self._core.id_to_token(token_id)
        return name


def _slices(texts: Sequence[str]) -> Iterator[list[str]]:
    """Cut texts into slices of bounded size; a text that is longer than one is alone in its own."""
    part: list[str] = []
    room = SLICE_CHARS
    for text in texts:
        if part and (len(part) == SLICE_TEXTS or len(text) > room):
            yield part
            part, room = [], SLICE_CHARS
        part.append(text)
        room -= len(text)
    if part:
        yield part


def _apply_added_tokens(core: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add tokens that only tokenizer_config.json knows, as transformers does."""
    decoder: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {}
    for _, token in sorted(decoder.items(), key=lambda item: int(item[0])):
        if core.token_to_id(token["content"]) is None:
            fields = ("single_word", "lstrip", "rstrip", "normalized", "special")
            flags = {key: bool(token[key]) for key in fields if key in token}
            core.add_tokens([tokenizers.AddedToken(token["content"], **flags)])


def _text(token: object) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None
