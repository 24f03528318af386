"""How a worker is told to stop: two events, set once, never cleared.

`soft` (SIGTERM, drain, memory limit): lease nothing and start nothing more, let running requests
finish. `hard` (the shutdown time is over): abort them too. Signal handlers only set an event;
an exception from a handler could land inside a commit and leave its outcome unknown.
"""

import threading
import time


class Stopping:
    """The two stop events and why they were set."""

    def __init__(self, shutdown_seconds: float) -> None:
        """Remember how long running requests may go on after a soft stop, in seconds."""
        self._shutdown_seconds = shutdown_seconds
        self._soft = threading.Event()
        self._hard = threading.Event()
        self._deadline: float | None = None
        self.reason = ""

    def request(self, reason: str) -> None:
        """Ask for a soft stop; the hard one follows by itself when the time is over."""
        if not self._soft.is_set():
            self.reason = reason
            self._deadline = time.monotonic() + self._shutdown_seconds
            self._soft.set()

    def abort(self, reason: str) -> None:
        """Ask for a hard stop now."""
        self.request(reason)
        self._hard.set()

    @property
    def is_soft(self) -> bool:
        """True from the first request to stop."""
        return self._soft.is_set()

    @property
    def is_hard(self) -> bool:
        """True when running requests have to be given up."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._hard.set()
        return self._hard.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a soft stop, at most `seconds` if given; True when it was asked for."""
        return self._soft.wait(seconds)
