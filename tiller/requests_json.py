"""What a program holds, as the JSON of a request: arrays become lists, NaN is refused here."""

import json
from typing import Any


def to_json(body: Any) -> bytes:
    """Write a request's body; arrays and numbers of numpy and torch are written as lists.

    Raises ValueError for a number that is not finite, TypeError for what no JSON can hold.
    """
    try:
        return json.dumps(body, default=_plain, allow_nan=False).encode()
    except ValueError as error:
        msg = f"A number of the request is NaN or infinite, which JSON cannot hold ({error})."
        raise ValueError(msg) from error


def _plain(value: Any) -> Any:
    """Give an array or a number of a numeric library as lists or a number."""
    if hasattr(value, "detach"):  # a tensor, wherever it is and whatever hangs on it
        value = value.detach()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset | tuple | range):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    msg = f"{type(value).__name__} cannot be sent: use numbers, texts, lists, arrays, dictionaries."
    raise TypeError(msg)
