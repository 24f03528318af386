"""Checks the sampling fields of a completions body, one small rule a field.

Numbers are strict: true is no number, "7" is no number, and 1.0 is no whole number. null means
that the field was not sent. Rules between a field and the prompt (context, min_tokens) are in
validate.py.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from app.catalog import ServedModel
from app.completions.problems import Problem, RefusedError, is_int, is_number, shown
from app.settings import Limits

# Choice i of n draws with seed + i, and the sum must stay a 64-bit number.
SEED_MAX = 2**63 - 1 - 1024
# Bounds what one request may put into a sampler's state; vLLM walks these lists at every token.
TOKEN_LIST_MAX = 1024
# vLLM bans a word in two forms, with and without a space before it, and takes 128 of them.
BAD_WORDS_MAX = 64
# Below this a division by the penalty overflows float32 logits.
REPETITION_PENALTY_MIN = 0.01
REPETITION_PENALTY_MAX = 100.0

HARD_BAN = -100  # a logit_bias of this much is no bias but a ban

Rule = Callable[[Any], Any]


class SamplingRules:
    """The rules of one model under the limits of this server."""

    def __init__(self, model: ServedModel, limits: Limits) -> None:
        """Bind model and limits."""
        self._vocab = model.vocab_size
        self._eos_ids = frozenset(model.eos_ids)
        self._limits = limits
        context = model.max_model_len
        self.rules: dict[str, Rule] = {
            "max_tokens": _whole(1, None, "to score a prompt, ask for prompt_logprobs"),
            "min_tokens": _whole(0, context),
            "temperature": _number(0, 100),
            "top_p": _number(0, 1, above=True),
            "top_k": _top_k,
            "min_p": _number(0, 1),
            "n": _whole(1, limits.choices),
            "seed": _whole(0, SEED_MAX),
            "stop": self._stop,
            "stop_token_ids": self._token_ids,
            "logprobs": _whole(0, limits.logprobs),
            "prompt_logprobs": _whole(0, limits.logprobs),
            "echo": _flag,
            "presence_penalty": _number(-2, 2),
            "frequency_penalty": _number(-2, 2),
            "repetition_penalty": _number(REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX),
            "logit_bias": self._logit_bias,
            "ignore_eos": _flag,
            "allowed_token_ids": self._allowed_token_ids,
            "bad_words": self._bad_words,
        }

    def read(self, body: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
        """Give the values of the sampling fields that were sent; add what is wrong."""
        values: dict[str, Any] = {}
        for name, value in body.items():
            rule = self.rules.get(name)
            if rule is None or value is None:
                continue
            try:
                values[name] = rule(value)
            except RefusedError as refusal:
                problems.append(Problem(name, f"{name} {refusal}"))
        problem = self._nothing_to_draw(values)
        if problem is not None:
            problems.append(problem)
        return values

    def _nothing_to_draw(self, values: Mapping[str, Any]) -> Problem | None:
        """Refuse fields that together leave no token: the sampler would draw one all the same."""
        allowed = values.get("allowed_token_ids")
        what = "the model" if allowed is None else "allowed_token_ids"
        banned = {token for token, bias in values.get("logit_bias", ()) if bias == HARD_BAN}
        if self._leaves_none(banned, allowed):
            message = f"logit_bias bans every token of {what}, so none could be drawn."
            return Problem("logit_bias", message)
        if not values.get("min_tokens"):
            return None
        # Until min_tokens is reached, what would stop is banned, with ignore_eos too.
        stops = self._eos_ids.union(values.get("stop_token_ids", ()))
        if self._leaves_none(banned | stops, allowed):
            message = (
                f"Until min_tokens is reached no token that stops is drawn, and every token of "
                f"{what} stops (it is in stop_token_ids, or ends the text) or is banned by "
                "logit_bias, so none could be drawn. Allow a token that does not stop, or leave "
                "min_tokens out."
            )
            return Problem("min_tokens", message)
        return None

    def _leaves_none(self, banned: AbstractSet[int], allowed: tuple[int, ...] | None) -> bool:
        if allowed is not None:
            return banned >= set(allowed)
        return len(banned) >= self._vocab and banned >= set(range(self._vocab))

    def _stop(self, value: Any) -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        limits = self._limits
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            msg = f"must be a string or a list of strings, not {shown(value)}."
            raise RefusedError(msg)
        if len(texts) > limits.stop_strings:
            msg = f"holds {len(texts)} strings; at most {limits.stop_strings} are allowed."
            raise RefusedError(msg)
        if not all(0 < len(text) <= limits.stop_string_chars for text in texts):
            msg = f"must hold strings of 1 to {limits.stop_string_chars} characters."
            raise RefusedError(msg)
        return tuple(texts)

    def _token_ids(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(map(is_int, value)):
            msg = f"must be a list of token ids, not {shown(value)}."
            raise RefusedError(msg)
        if len(value) > TOKEN_LIST_MAX:
            msg = f"holds {len(value)} token ids; at most {TOKEN_LIST_MAX} are allowed."
            raise RefusedError(msg)
        for token_id in value:
            self._check_token(token_id)
        return tuple(value)

    def _allowed_token_ids(self, value: Any) -> tuple[int, ...]:
        ids = self._token_ids(value)
        if not ids:
            msg = "is empty, so no token could be drawn. Name at least one token id."
            raise RefusedError(msg)
        return ids

    def _logit_bias(self, value: Any) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            msg = f"must be an object of token ids and numbers, not {shown(value)}."
            raise RefusedError(msg)
        if len(value) > TOKEN_LIST_MAX:
            msg = f"holds {len(value)} token ids; at most {TOKEN_LIST_MAX} are allowed."
            raise RefusedError(msg)
        biases: dict[int, float] = {}
        for key, bias in value.items():
            # isdecimal alone would let other scripts' digits and leading zeros through.
            if not (key.isascii() and key.isdecimal()) or str(token_id := int(key[:20])) != key:
                msg = f"has the key {shown(key)}, which is not a token id."
                raise RefusedError(msg)
            self._check_token(token_id)
            if not is_number(bias) or not -100 <= bias <= 100:
                msg = f"gives token {key} {shown(bias)}; a number from -100 to 100 is allowed."
                raise RefusedError(msg)
            biases[token_id] = float(bias)
        return tuple(biases.items())

    def _bad_words(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            msg = f"must be a list of strings, not {shown(value)}."
            raise RefusedError(msg)
        if len(value) > BAD_WORDS_MAX:
            msg = f"holds {len(value)} strings; at most {BAD_WORDS_MAX} are allowed."
            raise RefusedError(msg)
        if not all(0 < len(word) <= self._limits.stop_string_chars for word in value):
            msg = f"must hold strings of 1 to {self._limits.stop_string_chars} characters."
            raise RefusedError(msg)
        blank = next((word for word in value if word.isspace()), None)
        if blank is not None:
            msg = (
                f"holds {shown(blank)}, which is blank; a word is banned with and without spaces "
                "before it, so it needs a character of its own."
            )
            raise RefusedError(msg)
        return tuple(value)

    def _check_token(self, token_id: int) -> None:
        if not 0 <= token_id < self._vocab:
            msg = (
                f"names token {token_id}, which the model does not have; "
                f"its token ids are 0 to {self._vocab - 1}."
            )
            raise RefusedError(msg)


def _whole(least: int, most: int | None, hint: str | None = None) -> Rule:
    allowed = f"from {least} to {most}" if most is not None else f"of at least {least}"

    def rule(value: Any) -> int:
        if type(value) is not int or value < least or (most is not None and value > most):
            msg = f"must be a whole number {allowed}, not {shown(value)}"
            raise RefusedError(f"{msg}; {hint}." if hint else f"{msg}.")
        return value

    return rule


def _number(least: float, most: float, *, above: bool = False) -> Rule:
    allowed = f"above {least:g} and up to {most:g}" if above else f"from {least:g} to {most:g}"

    def rule(value: Any) -> float:
        if not is_number(value) or not least <= value <= most or (above and value == least):
            msg = f"must be a number {allowed}, not {shown(value)}."
            raise RefusedError(msg)
        return float(value)

    return rule


def _top_k(value: Any) -> int:
    """Read top_k; 0 and -1 both mean that all tokens stay."""
    if type(value) is not int or not -1 <= value < 2**31:
        msg = f"must be a whole number of at least 1, or 0 or -1 for all, not {shown(value)}."
        raise RefusedError(msg)
    return max(value, 0)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        msg = f"must be true or false, not {shown(value)}."
        raise RefusedError(msg)
    return value
