"""A question to a part that may hang, asked by somebody who cannot wait for long.

It is asked in a thread of its own, and one is under way at a time: whoever asks meanwhile waits
for the same answer. A part that hangs so costs one thread, however often it is asked, and a part
that answers late is heard by whoever asks then, or reads the latest answer afterwards.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Question(Generic[T]):
    """One question; safe to share between threads."""

    def __init__(self, ask: Callable[[], T], *, name: str) -> None:
        """Prepare; nothing is asked before `begin`. `name` is that of the thread."""
        self._ask = ask
        self._name = name
        self._lock = threading.Lock()
        self._asked: Future[T] | None = None
        self._latest: tuple[float, T] | None = None

    def begin(self) -> "Future[T]":
        """Ask, unless the question is under way already; give what will hold the answer.

        Without a thread to be had it holds a RuntimeError, and the next one asks anew.
        """
        with self._lock:
            if self._asked is None or self._asked.done():
                asked: Future[T] = Future()
                asked.set_running_or_notify_cancel()  # nobody who leaves may cancel it
                thread = threading.Thread(
                    target=self._run, args=(asked,), name=self._name, daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    asked.set_exception(error)
                self._asked = asked
            return self._asked

    def answer(self, seconds: float) -> T:
        """Ask and wait. Raises TimeoutError after `seconds`, and whatever the question raised."""
        return self.begin().result(seconds)

    def latest(self, seconds: float) -> tuple[float, T] | None:
        """Give the latest good answer and its age in seconds; None when it is older than that."""
        latest = self._latest
        if latest is None:
            return None
        age = time.monotonic() - latest[0]
        return (age, latest[1]) if age < seconds else None

    def _run(self, asked: "Future[T]") -> None:
        try:
            answer = self._ask()
        except BaseException as error:  # noqa: BLE001 (who waits must hear of it)
            asked.set_exception(error)
        else:
            self._latest = (time.monotonic(), answer)
            asked.set_result(answer)
