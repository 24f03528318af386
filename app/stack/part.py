"""One part of the stack: a server or a child process, when to start it again, how to stop it.

A part that dies is started again after a pause that doubles with every death and starts over
once the part ran well for a while. Nothing here blocks but `start`.
"""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from app.stack.log_file import LogFile
from app.stack.processes import end_all, in_session, wait_gone

PAUSE_SECONDS_MIN = 0.5
PAUSE_SECONDS_MAX = 30.0
STABLE_SECONDS = 60.0


class Part(Protocol):
    """What the supervisor knows of a part."""

    name: str
    log: LogFile

    @property
    def pid(self) -> int | None:
        """Process id; None when it does not run."""

    def start(self) -> None:
        """Start it, and wait until it can be used when it is a server."""

    def end_rest(self) -> None:
        """After its death: end everything that it left running."""

    def ask_to_stop(self) -> None:
        """Ask it to stop, without waiting."""

    def stop(self, seconds_max: float) -> None:
        """Wait until it stopped; kill it and all that it started when it takes longer."""


class Server(Protocol):
    """An embedded server as app/stack/postgres.py and redis.py offer it."""

    @property
    def pid(self) -> int | None:
        """Process id; None when it does not run."""

    def start(self) -> str:
        """Start and wait until it answers; return its URL."""

    def stop(self) -> None:
        """Stop and wait."""


@dataclass(slots=True)
class ServerPart:
    """An embedded server; `started` is called with its pid after every start."""

    # What stops each server well: a fast shutdown with a checkpoint, and a plain end.
    STOP_SIGNALS: ClassVar[dict[str, signal.Signals]] = {
        "postgres": signal.SIGINT,
        "redis": signal.SIGTERM,
    }

    name: str
    server: Server
    log: LogFile
    started: Callable[[int], None]

    @property
    def pid(self) -> int | None:
        """Process id; None when it does not run."""
        return self.server.pid

    def start(self) -> None:
        """Start and wait until it answers."""
        self.server.start()
        if (pid := self.server.pid) is not None:
            self.started(pid)

    def end_rest(self) -> None:
        """Do nothing: these servers end their own children."""

    def ask_to_stop(self) -> None:
        """Do nothing: a server is stopped alone, after everything that uses it."""

    def stop(self, seconds_max: float) -> None:  # noqa: ARG002 (the server bounds its own stop)
        """Stop and wait."""
        self.server.stop()


class ChildPart:
    """A process of ours, in a session of its own, its output in a log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: LogFile,
        environment: Mapping[str, str],
        folder: Path,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Remember how to start it; nothing runs before `start`."""
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        self._folder = folder
        self._descriptors = tuple(descriptors)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None when it does not run."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process is not None and running else None

    @property
    def exit_status(self) -> int | None:
        """Exit status of the last run; negative is the number of the signal that ended it."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it; its readiness is for somebody else to find out."""
        with self.log.open() as stream:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._folder,
                pass_fds=self._descriptors,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone
            )

    def end_rest(self) -> None:
        """Kill what is left of the dead child's session: an engine never outlives its worker."""
        if self._process is not None:
            rest = in_session(self._process.pid)
            end_all(rest, signal.SIGKILL, seconds_max=5.0)

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the child; what it started is its own to stop."""
        if self.pid is not None and self._process is not None:
            self._process.terminate()

    def stop(self, seconds_max: float) -> None:
        """Wait until it stopped; kill it and all that it started when it takes longer."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, seconds_max))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        wait_gone(in_session(self._process.pid), 1.0)
        self.end_rest()


@dataclass(slots=True)
class Backoff:
    """When a part may start again; all times are of time.monotonic()."""

    deaths: int = 0
    started_at: float = 0.0
    not_before: float = 0.0

    def started(self) -> None:
        """Note that it runs now."""
        self.started_at = time.monotonic()

    def died(self) -> float:
        """Note a death; return the pause in seconds before the next start."""
        now = time.monotonic()
        if now - self.started_at >= STABLE_SECONDS:
            self.deaths = 0
        self.deaths += 1
        pause = min(PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN * 2.0 ** (self.deaths - 1))
        self.not_before = now + pause
        return pause

    @property
    def is_due(self) -> bool:
        """True when the pause is over."""
        return time.monotonic() >= self.not_before
