"""An engine process ends with the worker that started it, also after kill -9 of the worker.

Two independent means: the kernel's parent-death signal, and a thread that watches the parent's
pid (the signal is lost when the parent died before it was asked for).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 1.0


def die_with_parent(expected_parent: int | None = None) -> None:
    """Tie this process to its parent; exit at once when the parent is already gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.getppid() if expected_parent is None else expected_parent
    if os.getppid() != parent:
        os._exit(1)
    watch = threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True)
    watch.start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)
