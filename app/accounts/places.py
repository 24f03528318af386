"""How many Completions one API process waits for at once: in all, and for each key.

A place costs memory and connections of this process, so it is counted here and nowhere else.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from app.errors import TooManyRequestsError

RETRY_AFTER_SECONDS = 5


class Places:
    """Places of one process."""

    def __init__(self, *, total_max: int, key_max: int) -> None:
        """Allow `total_max` in all and `key_max` for one key."""
        self._total_max = total_max
        self._key_max = key_max
        self._taken: Counter[UUID] = Counter()
        self._total = 0
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, key_id: UUID) -> Iterator[None]:
        """Keep a place for the length of the block. Raises TooManyRequestsError (queue_full)."""
        self.take(key_id)
        try:
            yield
        finally:
            self.give_back(key_id)

    def take(self, key_id: UUID) -> None:
        """Take a place until `give_back`. Raises TooManyRequestsError (queue_full)."""
        with self._lock:
            mine = self._taken[key_id]
            if mine >= self._key_max:
                msg = (
                    f"{mine} Completions of this key are waiting here already; at most "
                    f"{self._key_max} may (completions_waiting_key in GET /v1/limits). Wait for "
                    "one to end, or send them as a Job."
                )
                raise _queue_full(msg)
            if self._total >= self._total_max:
                msg = f"{self._total} Completions are waiting here already. Send it again later."
                raise _queue_full(msg)
            self._taken[key_id] += 1
            self._total += 1

    def give_back(self, key_id: UUID) -> None:
        """Free a place that was taken."""
        with self._lock:
            self._total -= 1
            self._taken[key_id] -= 1
            if self._taken[key_id] == 0:
                del self._taken[key_id]

    def of(self, key_id: UUID) -> int:
        """Count the places of a key."""
        return self._taken.get(key_id, 0)


def _queue_full(message: str) -> TooManyRequestsError:
    return TooManyRequestsError(message, code="queue_full", retry_after=RETRY_AFTER_SECONDS)
