"""Named places where a fault run may make this process die, as kill -9 would.

A point is armed by TILLER_FAILPOINT=name in the environment of a worker that the fault tests
start; without it a point costs one comparison.
"""

import os

_ARMED = os.environ.get("TILLER_FAILPOINT")
KILLED = 137


def failpoint(name: str) -> None:
    """End the process here, without any cleaning up, if this point is armed."""
    if name == _ARMED:
        os._exit(KILLED)
