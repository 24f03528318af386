"""What a program holds, as the JSON of a request: arrays become lists, NaN is refused here.

The text is UTF-8 without escapes or spaces: the service limits a body by its bytes.
"""

import json
from typing import Any, Final

# What json says of a value that it refuses, and what is said to the caller.
_WRONG: Final = {
    "Out of range float": "A number of the request is NaN or infinite, which JSON cannot hold",
    "Circular reference": "A list or dictionary of the request contains itself",
}


def to_json(body: Any) -> bytes:
    """Write a request's body; arrays and numbers of numpy and torch are written as lists.

    Raises ValueError for a number that is not finite, for a text with a lone surrogate and for a
    list or dictionary that contains itself, TypeError for what no JSON can hold.
    """
    try:
        text = json.dumps(
            body, default=_plain, allow_nan=False, ensure_ascii=False, separators=(",", ":")
        )
    except ValueError as error:
        for beginning, meaning in _WRONG.items():
            if str(error).startswith(beginning):
                msg = f"{meaning} ({error})."
                raise ValueError(msg) from error
        raise
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        before = text[max(0, error.start - 40) : error.start]
        msg = (
            f"A text of the request has the lone surrogate U+{ord(text[error.start]):04X}, half of "
            f"a character, which UTF-8 cannot hold; it stands after {before!r}."
        )
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
