"""Turns the pieces of a streamed Completion into chunks in OpenAI's shape.

Everything of the plain answer is in the chunks once: texts, token ids and logprobs joined are the
plain answer's; the prompt's part comes with a choice's first chunk, warnings with the first of
all, usage and what was captured in one last chunk without choices. Of a model that only a worker
knows, the worker writes them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from app.catalog import Tokenizer
from app.completions.answer import (
    ChoiceWriter,
    activations_of,
    head_of,
    usage_of,
    warnings_of,
)
from app.completions.intake import PreparedCompletion

Piece = Mapping[str, Any]  # `place` of the prompt, `index` of the choice, and as in answer.py


class ChunkWriter:
    """Writes the chunks of one stream."""

    def __init__(self, prepared: PreparedCompletion, tokenizer: Tokenizer) -> None:
        """Begin the stream."""
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._head = head_of(prepared)
        self._warnings = warnings_of(prepared)
        self._writers: dict[int, ChoiceWriter] = {}
        self._prompt_logprobs: dict[int, Sequence[Any] | None] = {}
        self._held: list[Piece] = []

    def write(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Write the chunks of some pieces, which may be none."""
        chunks = []
        for piece in self._ready(pieces):
            chunk = self._chunk(piece)
            if chunk is not None:
                chunks.append(chunk)
        return chunks

    def last(self, ends: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Write the chunk after all others; None when there is nothing to say in it."""
        activations = activations_of(ends[0]["captures"])
        if activations is None and not self._prepared.include_usage:
            return None
        chunk = {**self._head, "choices": []}
        if self._prepared.include_usage:
            generated = sum(end["completion_tokens"] for end in ends)
            chunk["usage"] = usage_of(self._prepared, generated)
        if activations is not None:
            chunk["activations"] = activations
        return chunk

    def _ready(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Keep back choices whose prompt's logprobs have not come yet: they begin with them."""
        ready: list[Piece] = []
        self._held += pieces
        for piece in self._held:
            sampling = self._prepared.specs[piece["place"]].sampling
            if piece["index"] == 0 or sampling.prompt_logprobs is None:
                self._prompt_logprobs.setdefault(piece["place"], piece["prompt_logprobs"])
        held, self._held = self._held, []
        for piece in held:
            (ready if piece["place"] in self._prompt_logprobs else self._held).append(piece)
        return ready

    def _chunk(self, piece: Piece) -> dict[str, Any] | None:
        place = piece["place"]
        spec = self._prepared.specs[place]
        index = place * spec.sampling.n + piece["index"]
        writer = self._writers.get(index)
        if writer is None:
            writer = ChoiceWriter(self._prepared, spec, self._tokenizer, index=index)
            self._writers[index] = writer
        elif self._says_nothing(piece):
            return None
        choice = writer.write(piece, self._prompt_logprobs[place])
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._prepared.include_usage:
            chunk["usage"] = None
        if self._warnings:
            chunk["warnings"], self._warnings = self._warnings, []
        return chunk

    def _says_nothing(self, piece: Piece) -> bool:
        """Tell whether a token has no text yet, and nothing else of it was asked for."""
        return (
            not piece["text"]
            and piece["finish_reason"] is None
            and piece["token_logprobs"] is None
            and not self._prepared.return_token_ids
        )


class WrittenChunks:
    """Gives on the chunks that a worker wrote; `write` and `last` as of ChunkWriter."""

    def write(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Give the chunks of some pieces, which may be none."""
        return [chunk for piece in pieces for chunk in piece["chunks"]]

    def last(self, ends: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Give the chunk after all others; None when there is nothing to say in it."""
        last: dict[str, Any] | None = ends[0]["last"]
        return last
