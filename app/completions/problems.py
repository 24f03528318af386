"""What is wrong with a request: values, not exceptions, so that all of them can be told at once."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeVar

import orjson

T = TypeVar("T")
SHOWN_CHARS_MAX = 80
UNKNOWN_FIELDS_MAX = 50  # looking for a near name costs about 10 microseconds
# No field has a name so long. The search for near ones takes memory and time by the square.
NEAR_CHARS_MAX = 64
# What other services and libraries call a field of ours.
OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "activation": ("activations",),
    "alpha": ("scale",),
    "capture": ("captures",),
    "coefficient": ("scale",),
    "direction": ("activations",),
    "input": ("prompt",),
    "inputs": ("prompt", "requests"),
    "input_ids": ("prompt",),
    "items": ("requests",),
    "layer": ("layer_indices", "layers"),
    "layers": ("layer_indices", "layer"),
    "max_completion_tokens": ("max_tokens",),
    "max_length": ("max_tokens",),
    "max_new_tokens": ("max_tokens",),
    "messages": ("prompt",),
    "multiplier": ("scale",),
    "num_return_sequences": ("n",),
    "position": ("position_indices", "positions"),
    "positions": ("position_indices", "at"),
    "prompt_token_ids": ("prompt",),
    "prompts": ("prompt", "requests"),
    "shared": ("defaults",),
    "spans": ("position_spans", "at"),
    "steer": ("apply_steering_vectors",),
    "steering": ("apply_steering_vectors",),
    "steering_vectors": ("apply_steering_vectors",),
    "stop_sequences": ("stop",),
    "strength": ("scale",),
    "text": ("prompt",),
    "tokens": ("prompt",),
    "top_logprobs": ("logprobs",),
    "vector": ("apply_steering_vectors",),
    "vectors": ("activations", "apply_steering_vectors"),
    "weight": ("scale",),
}
CHAT = " A conversation has to be written out as text, as the model's chat template does it."


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule: the field, what was sent, what is allowed, what to do."""

    param: str | None
    message: str
    code: str = "invalid_request"


class RefusedError(Exception):
    """A value breaks a rule of its field; carries the rest of the sentence after its name."""


def shown(value: object) -> str:
    """Write a value as it was sent, cut to a length that fits into a message."""
    text = orjson.dumps(value).decode() if not isinstance(value, str) else f'"{value[:100]}"'
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 1] + "…"


def unknown_field(name: str, known: Iterable[str], *, of: str) -> str:
    """Say that `of` has no field of this name, and which one may have been meant."""
    names = list(known)
    near = [other for other in OTHER_NAMES.get(name, ()) if other in names]
    if not near and len(name) <= NEAR_CHARS_MAX:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    hint = f" Did you mean {near[0]!r}?" if near else " Leave it out."
    return f"{of} has no field {name[:100]!r}.{hint}{CHAT if name == 'messages' else ''}"


def unknown_fields(sent: Iterable[str], known: frozenset[str], *, of: str) -> list[Problem]:
    """List a problem for each field that does not exist, up to a bound that no mistake reaches."""
    strange = islice((name for name in sent if name not in known), UNKNOWN_FIELDS_MAX)
    return [Problem(name[:200], unknown_field(name, known, of=of)) for name in strange]


def sentence(text: str) -> str:
    """End a sentence that may have its end already."""
    return text if text.endswith((".", "?")) else text + "."


def first_twin(items: Iterable[T]) -> T | None:
    """Give the first item that has come before, or None when all are distinct."""
    seen: set[T] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def is_int(value: Any) -> bool:
    """Tell whether a JSON value is a whole number (true and 1.0 are not)."""
    return type(value) is int


def is_number(value: Any) -> bool:
    """Tell whether a JSON value is a number (true is not)."""
    return type(value) is int or type(value) is float
