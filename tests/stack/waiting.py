"""Waiting for a condition with a deadline, in place of sleeping and hoping."""

import time
from collections.abc import Callable

DEADLINE_SECONDS = 30.0


def wait_for(condition: Callable[[], object], what: str, seconds: float = DEADLINE_SECONDS):
    """Return the first true answer of `condition`; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        if answer := condition():
            return answer
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for: {what}"
        time.sleep(0.02)
