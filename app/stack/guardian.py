"""A small process that cleans up when the supervisor is killed and cannot do it itself.

The supervisor holds the other end of a pipe and says which processes there are. When the pipe
closes without a goodbye, the guardian ends what it was told of and everything that carries the
stack's token, engines included. It runs in a session of its own, so that a signal to the
supervisor's group does not reach it, and imports nothing of the service.

Should both be killed, the next start reads the same lines from the data folder's lock file.

Lines: `token WORD`, `remove PATH` (a file that promises a running stack), `stop PID CREATED
SIGNAL` (a server that wants a certain signal), `goodbye`.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from app.stack.processes import end_all, with_token

STOP_SECONDS_MAX = 15.0


class Guardian:
    """The supervisor's side."""

    def __init__(self, token: str, *, promise: Path, remember: Callable[[str], None]) -> None:
        """Start the guardian of the processes that carry `token` and of the file `promise`.

        `remember` keeps each line where the next start finds it.
        """
        self._remember = remember
        reader, self._writer = os.pipe()
        command = [sys.executable, "-m", "app.stack.guardian", str(reader)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(reader,),
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
        os.close(reader)
        self._say(f"token {token}")
        self._say(f"remove {promise}")

    def watch(self, pid: int, how: signal.Signals) -> None:
        """Name a process that does not carry the token, and the signal that stops it well."""
        with contextlib.suppress(psutil.Error):
            self._say(f"stop {pid} {psutil.Process(pid).create_time()} {how.name}")

    def dismiss(self) -> None:
        """Let the guardian end without touching anything."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"goodbye\n")
        os.close(self._writer)
        self._process.wait(10)

    def _say(self, line: str) -> None:
        self._remember(line)
        # A dead guardian is no reason to stop serving; the next start cleans up as well.
        with contextlib.suppress(OSError):
            os.write(self._writer, f"{line}\n".encode())


def clean_up(lines: Iterable[str]) -> None:
    """End what the lines name; nothing happens when they end with a goodbye."""
    token: str | None = None
    promise: Path | None = None
    servers: list[tuple[int, float, signal.Signals]] = []
    for line in lines:
        match line.split():
            case ["token", word]:
                token = word
            case ["remove", *_]:
                promise = Path(line.removeprefix("remove ").rstrip("\n"))
            case ["stop", pid, created, how]:
                servers.append((int(pid), float(created), signal.Signals[how]))
            case ["goodbye"]:
                return
    if promise is not None:
        promise.unlink(missing_ok=True)
    if token is not None:
        end_all(with_token(token), signal.SIGKILL, seconds_max=STOP_SECONDS_MAX)
    for server_pid, server_created, server_signal in servers:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(server_pid)
            # The number may belong to somebody else by now.
            if process.create_time() == server_created:
                end_all([process], server_signal, seconds_max=STOP_SECONDS_MAX)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as pipe:
        clean_up(pipe)
