"""Remembers what became of a list that many requests share.

The defaults of a Job put the very same list object into each of its requests: it is checked once.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from app.completions.problems import RefusedError

T = TypeVar("T")


class Remembered(Generic[T]):
    """A check whose outcome, good or bad, is kept for each list object it was asked about."""

    def __init__(self, check: Callable[[Any], T]) -> None:
        """Wrap `check`, which raises RefusedError for what it refuses."""
        self._check = check
        # Keyed by identity; each value keeps its list alive, so an id is never used twice.
        self._known: dict[int, tuple[Any, T | RefusedError]] = {}

    def __call__(self, sent: Any) -> T:
        """Give the outcome for this object. Raises RefusedError, a new one each time."""
        known = self._known.get(id(sent))
        if known is None:
            outcome: T | RefusedError
            try:
                outcome = self._check(sent)
            except RefusedError as refusal:
                outcome = refusal
            known = self._known[id(sent)] = (sent, outcome)
        if isinstance(known[1], RefusedError):
            raise RefusedError(*known[1].args)
        return known[1]
