"""Finding and ending processes that outlive what started them.

A child runs in a session of its own. Everything that it starts, and what those start, stays in
that session, also after the child itself is gone, and carries the stack's token in its
environment. So an engine that lost its worker is found without being told of it.
"""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterable

import psutil

TOKEN_VARIABLE = "TILLER_STACK_TOKEN"  # noqa: S105 (a name, no secret)
_POLL_SECONDS = 0.02


def new_token() -> str:
    """Make the word that marks every process of one run of the stack."""
    return secrets.token_hex(16)


def in_session(session: int) -> list[psutil.Process]:
    """List the living processes of a session (named by the pid of its first process)."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) == session:
                found.append(psutil.Process(pid))
    return [process for process in found if _is_alive(process)]


def with_token(token: str) -> list[psutil.Process]:
    """List the living processes that carry `token`, other than this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            marked = process.environ().get(TOKEN_VARIABLE) == token
            if marked and process.pid != os.getpid() and _is_alive(process):
                found.append(process)
    return found


def end_all(
    processes: Iterable[psutil.Process], how: signal.Signals, *, seconds_max: float
) -> None:
    """Send `how` to each process, wait until they are gone, and kill those that stay."""
    remaining = list(processes)
    for process in remaining:
        with contextlib.suppress(psutil.Error):
            process.send_signal(how)
    if not wait_gone(remaining, seconds_max):
        for process in remaining:
            with contextlib.suppress(psutil.Error):
                process.kill()
        wait_gone(remaining, seconds_max)


def wait_gone(processes: Iterable[psutil.Process], seconds_max: float) -> bool:
    """Wait until none of the processes lives (a zombie does not); False when one still does."""
    remaining = list(processes)
    deadline = time.monotonic() + seconds_max
    while remaining := [process for process in remaining if _is_alive(process)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
