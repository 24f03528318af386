"""Writes an answer as OpenAI's text_completion object, out of what the worker sent.

The worker sends JSON: a list with, for each prompt, `choices` (index, text, token_ids,
finish_reason, stop_reason, token_logprobs, top_logprobs), `prompt_logprobs` and `captures`, whose
tensors are encoded already. Alternatives are [token id, text, logprob]. The pieces of a stream
are choices that come bit by bit (stream_chunks.py).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from app.catalog import Tokenizer
from app.completions.captures import RESIDUAL_STREAM
from app.completions.intake import PreparedCompletion
from app.completions.spec import RequestSpec

Alternative: TypeAlias = Sequence[Any]  # [token id, text, logprob]
Outcome: TypeAlias = Mapping[str, Any]


def completion_object(
    prepared: PreparedCompletion, outcomes: Sequence[Outcome], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Put the outcomes of all prompts together; choices count on from prompt to prompt."""
    choices: list[dict[str, Any]] = []
    for spec, outcome in zip(prepared.specs, outcomes, strict=True):
        for choice in outcome["choices"]:
            writer = ChoiceWriter(prepared, spec, tokenizer, index=len(choices))
            choices.append(writer.write(choice, outcome["prompt_logprobs"]))
    generated = sum(len(c["token_ids"]) for outcome in outcomes for c in outcome["choices"])
    answer = {
        **head_of(prepared),
        "choices": choices,
        "usage": usage_of(prepared, generated),
    }
    activations = activations_of(outcomes[0]["captures"])
    if activations is not None:
        answer["activations"] = activations
    warnings = warnings_of(prepared)
    if warnings:
        answer["warnings"] = warnings
    return answer


def head_of(prepared: PreparedCompletion) -> dict[str, Any]:
    """Write what an answer, and each chunk of a stream, begins with."""
    return {
        "id": f"cmpl-{prepared.id.hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": prepared.model.name,
    }


def usage_of(prepared: PreparedCompletion, generated: int) -> dict[str, int]:
    """Count tokens as they are charged."""
    prompt = sum(spec.prompt_tokens for spec in prepared.specs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


def warnings_of(prepared: PreparedCompletion) -> list[str]:
    """List what the client should look at again, each thing once."""
    return list(dict.fromkeys(code for spec in prepared.specs for code in spec.warnings))


def activations_of(captures: Mapping[str, Any]) -> dict[str, Any] | None:
    """Give what was captured: the residual stream, and captures by their names."""
    if not captures:
        return None
    named = {name: tensor for name, tensor in captures.items() if name != RESIDUAL_STREAM}
    activations: dict[str, Any] = {}
    if RESIDUAL_STREAM in captures:
        tensor = captures[RESIDUAL_STREAM]
        left_out = ("layers", "positions")
        activations[RESIDUAL_STREAM] = {k: v for k, v in tensor.items() if k not in left_out}
    if named:
        activations["captures"] = named
    return activations


class ChoiceWriter:
    """Writes one choice, whole or piece by piece: the pieces joined are the whole."""

    def __init__(
        self,
        prepared: PreparedCompletion,
        spec: RequestSpec,
        tokenizer: Tokenizer,
        *,
        index: int,
    ) -> None:
        """Begin the choice at place `index` of the answer."""
        self._prepared = prepared
        self._spec = spec
        self._tokenizer = tokenizer
        self._index = index
        self._special = frozenset(prepared.model.special_token_ids)
        self._offset = 0  # of the next token, in characters of the text
        self._has_begun = False

    def write(
        self, piece: Mapping[str, Any], prompt_logprobs: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Write the next piece; what belongs to the prompt goes with the first."""
        spec, is_first = self._spec, not self._has_begun
        self._has_begun = True
        echo = self._echoed() if is_first and spec.sampling.echo else ""
        of_prompt = prompt_logprobs if is_first else None
        has_logprobs = spec.sampling.logprobs is not None
        written: dict[str, Any] = {
            "index": self._index,
            "text": echo + piece["text"],
            "logprobs": self._logprobs(piece, of_prompt) if has_logprobs else None,
            "finish_reason": piece["finish_reason"],
            "stop_reason": piece["stop_reason"],
        }
        if self._prepared.return_token_ids:
            if is_first:
                written["prompt_token_ids"] = list(spec.prompt_token_ids)
            written["token_ids"] = piece["token_ids"]
        if of_prompt is not None:
            written["prompt_logprobs"] = [
                None if token is None else [_named(item) for item in token] for token in of_prompt
            ]
        return written

    def _echoed(self) -> str:
        if self._spec.prompt is not None:
            return self._spec.prompt
        return self._tokenizer.decode(self._spec.prompt_token_ids)

    def _logprobs(
        self, piece: Mapping[str, Any], of_prompt: Sequence[Any] | None
    ) -> dict[str, Any]:
        """Write logprobs in OpenAI's shape: four lists with one item a token."""
        lists = _Logprobs(self._offset)
        if self._spec.sampling.echo and of_prompt is not None:
            for token_id, listed in zip(self._spec.prompt_token_ids, of_prompt, strict=True):
                # The token's own logprob comes first; the first token of all has none.
                own, others = (listed[0], listed) if listed else (None, None)
                text = self._text(token_id, others)
                lists.add(text, own[2] if own else None, others, width=self._width(token_id, text))
        for token_id, logprob, others in zip(
            piece["token_ids"], piece["token_logprobs"], piece["top_logprobs"], strict=True
        ):
            text = self._text(token_id, others)
            own = (token_id, text, logprob)
            lists.add(text, logprob, [*others, own], width=self._width(token_id, text))
        self._offset = lists.offset
        return lists.written

    def _text(self, token_id: int, others: Sequence[Alternative] | None) -> str:
        for item in others or ():
            if item[0] == token_id:
                return str(item[1])
        return self._tokenizer.decode([token_id])

    def _width(self, token_id: int, text: str) -> int:
        return 0 if token_id in self._special else len(text)


class _Logprobs:
    """The four lists, growing token by token; offsets count characters of the text."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.written: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def add(
        self,
        text: str,
        logprob: float | None,
        alternatives: Sequence[Alternative] | None,
        *,
        width: int,
    ) -> None:
        top: dict[str, float] | None = None
        if alternatives is not None:
            top = {}
            for _, token, value in alternatives:
                # Two token ids may read the same; the likelier one keeps the key.
                top.setdefault(token, value)
        lists = self.written
        lists["tokens"].append(text)
        lists["token_logprobs"].append(logprob)
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(self.offset)
        self.offset += width


def _named(item: Alternative) -> dict[str, Any]:
    return {"token_id": item[0], "token": item[1], "logprob": item[2]}
