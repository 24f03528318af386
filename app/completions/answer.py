"""Writes an answer as OpenAI's text_completion object, out of what the worker sent.

The worker sends JSON: a list with, for each prompt, `choices` (index, text, token_ids,
finish_reason, stop_reason, token_logprobs, top_logprobs), `prompt_logprobs` and `captures`, whose
tensors are encoded already. Alternatives are [token id, text, logprob].
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
        writer = ChoiceWriter(prepared, spec, outcome, tokenizer)
        for choice in outcome["choices"]:
            choices.append(writer.write(len(choices), choice))
    answer: dict[str, Any] = {
        "id": f"cmpl-{prepared.id.hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": prepared.model.name,
        "choices": choices,
        "usage": usage_of(prepared, outcomes),
    }
    activations = activations_of(outcomes[0]["captures"])
    if activations is not None:
        answer["activations"] = activations
    warnings = list(dict.fromkeys(code for spec in prepared.specs for code in spec.warnings))
    if warnings:
        answer["warnings"] = warnings
    return answer


def usage_of(prepared: PreparedCompletion, outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Count tokens as they are charged."""
    prompt = sum(spec.prompt_tokens for spec in prepared.specs)
    generated = sum(len(c["token_ids"]) for outcome in outcomes for c in outcome["choices"])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


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
    """Writes the choices of one prompt."""

    def __init__(
        self,
        prepared: PreparedCompletion,
        spec: RequestSpec,
        outcome: Outcome,
        tokenizer: Tokenizer,
    ) -> None:
        """Bind what all choices share."""
        self._prepared = prepared
        self._spec = spec
        self._prompt_logprobs = outcome["prompt_logprobs"]
        self._tokenizer = tokenizer
        self._special = frozenset(prepared.model.special_token_ids)

    def write(self, index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
        """Write one choice under its place in the answer."""
        spec = self._spec
        echo = self._echoed() if spec.sampling.echo else ""
        written: dict[str, Any] = {
            "index": index,
            "text": echo + choice["text"],
            "logprobs": self._logprobs(choice) if spec.sampling.logprobs is not None else None,
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        if self._prepared.return_token_ids:
            written["prompt_token_ids"] = list(spec.prompt_token_ids)
            written["token_ids"] = choice["token_ids"]
        if self._prompt_logprobs is not None:
            written["prompt_logprobs"] = [
                None if token is None else [_named(item) for item in token]
                for token in self._prompt_logprobs
            ]
        return written

    def _echoed(self) -> str:
        if self._spec.prompt is not None:
            return self._spec.prompt
        return self._tokenizer.decode(self._spec.prompt_token_ids)

    def _logprobs(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        """Write logprobs in OpenAI's shape: four lists with one item a token."""
        lists = _Logprobs()
        if self._spec.sampling.echo and self._prompt_logprobs is not None:
            for token_id, listed in zip(
                self._spec.prompt_token_ids, self._prompt_logprobs, strict=True
            ):
                # The token's own logprob comes first; the first token of all has none.
                own, others = (listed[0], listed) if listed else (None, None)
                text = self._text(token_id, others)
                lists.add(text, own[2] if own else None, others, width=self._width(token_id, text))
        for token_id, logprob, others in zip(
            choice["token_ids"], choice["token_logprobs"], choice["top_logprobs"], strict=True
        ):
            text = self._text(token_id, others)
            own = (token_id, text, logprob)
            lists.add(text, logprob, [*others, own], width=self._width(token_id, text))
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

    def __init__(self) -> None:
        self.written: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        self._offset = 0

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
        lists["text_offset"].append(self._offset)
        self._offset += width


def _named(item: Alternative) -> dict[str, Any]:
    return {"token_id": item[0], "token": item[1], "logprob": item[2]}
