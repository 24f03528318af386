"""How many Completions one API process waits for at once: in all, for each account, for each key.

A place costs memory and connections of this process, so it is counted here and nowhere else. No
account can take all of them, however many keys it has.
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

    def __init__(self, *, total_max: int, account_max: int, key_max: int) -> None:
        """Allow `total_max` in all, `account_max` for one account and `key_max` for one key."""
        self._total_max = total_max
        self._account_max = account_max
        self._key_max = key_max
        self._of_accounts: Counter[UUID] = Counter()
        self._of_keys: Counter[UUID] = Counter()
        self._total = 0
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, account_id: UUID, key_id: UUID) -> Iterator[None]:
        """Keep a place for the length of the block. Raises TooManyRequestsError (queue_full)."""
        self.take(account_id, key_id)
        try:
            yield
        finally:
            self.give_back(account_id, key_id)

    def take(self, account_id: UUID, key_id: UUID) -> None:
        """Take a place until `give_back`. Raises TooManyRequestsError (queue_full)."""
        with self._lock:
            _refuse_over(self._of_keys[key_id], self._key_max, "key")
            _refuse_over(self._of_accounts[account_id], self._account_max, "account")
            if self._total >= self._total_max:
                msg = f"{self._total} Completions are waiting here already. Send it again later."
                raise _queue_full(msg)
            self._of_keys[key_id] += 1
            self._of_accounts[account_id] += 1
            self._total += 1

    def give_back(self, account_id: UUID, key_id: UUID) -> None:
        """Free a place that was taken."""
        with self._lock:
            self._total -= 1
            for counter, name in ((self._of_keys, key_id), (self._of_accounts, account_id)):
                counter[name] -= 1
                if counter[name] == 0:
                    del counter[name]

    def of(self, key_id: UUID) -> int:
        """Count the places of a key."""
        return self._of_keys.get(key_id, 0)

    def of_account(self, account_id: UUID) -> int:
        """Count the places of an account."""
        return self._of_accounts.get(account_id, 0)


def _refuse_over(mine: int, allowed: int, whose: str) -> None:
    if mine >= allowed:
        msg = (
            f"{mine} Completions of this {whose} are waiting here already; at most {allowed} may "
            f"(completions_waiting_{whose} in GET /v1/limits). Wait for one to end, or send them "
            "as a Job."
        )
        raise _queue_full(msg)


def _queue_full(message: str) -> TooManyRequestsError:
    return TooManyRequestsError(message, code="queue_full", retry_after=RETRY_AFTER_SECONDS)
