"""The stub worker, told to stop at one point of its start: STOP_AT names a function of it.

With STOP_BUSY set the signal waits until a Completion runs.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.faults.stub_worker import main
from worker import __main__ as worker_main
from worker import service
from worker.service import WorkerService

POINTS: dict[str, tuple[Any, str]] = {
    "register_worker": (service, "register_worker"),
    "worker_ready": (service, "worker_ready"),
    "build_worker": (worker_main, "build_worker"),
}


def stopping_at(work: Callable[..., Any]) -> Callable[..., Any]:
    """Do what is done at this point, then send the signal to oneself."""

    def done_and_told(*given: Any, **named: Any) -> Any:
        result = work(*given, **named)
        if "STOP_BUSY" in os.environ:
            wait_for_a_completion(given[0])
        os.kill(os.getpid(), signal.SIGTERM)
        for thread in threading.enumerate():
            if thread.name == "sigterm":
                thread.join(1)  # it may be done with what it can do before this point is left
        return result

    return done_and_told


def wait_for_a_completion(worker: WorkerService) -> None:
    """Wait until one is in the engine."""
    deadline = time.monotonic() + 30
    while not worker._stats().requests_running:
        assert time.monotonic() < deadline, "no Completion came"
        time.sleep(0.01)


if __name__ == "__main__":
    place, name = POINTS[os.environ["STOP_AT"]]
    with mock.patch.object(place, name, stopping_at(getattr(place, name))):
        sys.exit(main())
