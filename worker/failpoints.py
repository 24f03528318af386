"""Named places where a fault run may make this process die, as kill -9 would, or stand still.

A point is armed by TILLER_FAILPOINT=name (die) or name:stop (SIGSTOP to itself, every time) in
the environment of a worker that the fault tests start; without it a point costs one comparison.
"""

import os
import signal

_ARMED, _, _HOW = os.environ.get("TILLER_FAILPOINT", "").partition(":")
KILLED = 137


def failpoint(name: str) -> None:
    """End or stop the process here, without any cleaning up, if this point is armed."""
    if name != _ARMED:
        return
    if _HOW == "stop":
        # To this thread: it does not go one step further, whichever thread is told first.
        signal.raise_signal(signal.SIGSTOP)
    else:
        os._exit(KILLED)
