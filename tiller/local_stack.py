"""A whole service on this machine, as a child of this program: start, use, stop.

Runs `python -m app up`, so the server extra has to be installed; imports nothing of it.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiller.errors import TillerError

STOP_SECONDS = 60.0


class StackError(TillerError):
    """The service did not come up; the message says where its logs are."""


@contextlib.contextmanager
def running_stack(
    data_dir: Path, *, port: int = 0, ready_seconds: float = 600.0
) -> Iterator[dict[str, Any]]:
    """Start a service in `data_dir`, give its credentials, stop it and all its processes.

    Raises StackError when it is not ready in time or ends by itself.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "app", "up", "--data-dir", str(data_dir), "--port", str(port)]
    process = subprocess.Popen(command)
    try:
        yield _credentials(process, data_dir, ready_seconds)
    finally:
        _stop(process)


def _credentials(
    process: "subprocess.Popen[bytes]", data_dir: Path, ready_seconds: float
) -> dict[str, Any]:
    path = data_dir / "credentials.json"
    started = time.time()
    while time.time() - started < ready_seconds:
        if process.poll() is not None:
            msg = f"The service ended with status {process.returncode}; see {data_dir / 'logs'}."
            raise StackError(msg)
        # An older run's file may still lie there until the new service has removed it.
        if path.exists() and path.stat().st_mtime >= started - 1:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return data
        time.sleep(0.1)
    msg = f"The service was not ready after {ready_seconds:.0f} s; see {data_dir / 'logs'}."
    raise StackError(msg)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
