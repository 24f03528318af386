"""A question to a part that may hang, asked by somebody who cannot wait for long.

It is asked in a thread of its own, and one is under way at a time: whoever asks meanwhile waits
for the same answer. A part that hangs so costs one thread, however often it is asked, and a part
that answers late is heard by whoever asks then.
"""

import threading
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

    def begin(self) -> "Future[T]":
        """Ask, unless the question is under way already; give what will hold the answer."""
        with self._lock:
            if self._asked is None or self._asked.done():
                self._asked = Future()
                self._asked.set_running_or_notify_cancel()  # nobody who leaves may cancel it
                threading.Thread(
                    target=self._run, args=(self._asked,), name=self._name, daemon=True
                ).start()
            return self._asked

    def answer(self, seconds: float) -> T:
        """Ask and wait. Raises TimeoutError after `seconds`, and whatever the question raised."""
        return self.begin().result(seconds)

    def _run(self, asked: "Future[T]") -> None:
        try:
            answer = self._ask()
        except BaseException as error:  # noqa: BLE001 (who waits must hear of it)
            asked.set_exception(error)
        else:
            asked.set_result(answer)
