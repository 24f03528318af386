"""Keeps the parts of a stack running until it is told to stop, then stops them in order.

One thread does everything: it sleeps until a signal arrives (a child died, Ctrl-C, SIGTERM) or a
fifth of a second passed, looks at each part, and starts again what is due. A second Ctrl-C while
stopping kills instead of waiting. Parts are started in the order they were added; children are
asked to stop together and servers stop after them, last one first.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from app.stack.part import Backoff, ChildPart, Part

TICK_SECONDS = 0.2
STOP_SECONDS_MAX = 20.0
# A part that cannot even start once has a fault that more tries do not cure.
FIRST_DEATHS_MAX = 4
TRIM_SECONDS = 60.0


class StopRequested(Exception):  # noqa: N818 (a wish, not an error)
    """Somebody pressed Ctrl-C or sent SIGTERM."""


class PartFailedError(Exception):
    """A part died again and again before the stack was ever ready; the message holds its log."""


@dataclass(slots=True)
class _Watched:
    part: Part
    backoff: Backoff = field(default_factory=Backoff)
    is_down: bool = False


class Supervisor:
    """Starts, watches, restarts and stops parts."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` prints one line for the person at the terminal."""
        self._say = say
        self._watched: list[_Watched] = []
        self._stops = 0
        self._is_ready = False
        self._wakeup: tuple[int, int] | None = None
        self._trimmed_at = time.monotonic()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take over Ctrl-C, SIGTERM, SIGHUP and the news of dead children while inside."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_stop) for number in taken}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        old_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._wakeup = (reader, writer)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._wakeup = None
            os.close(reader)
            os.close(writer)

    def start(self, part: Part) -> None:
        """Start a part and watch it from now on. Raises what its start raises, StopRequested."""
        self.check_stop()
        part.log.rotate()
        watched = _Watched(part)
        self._watched.append(watched)
        part.start()
        watched.backoff.started()

    def ready(self) -> None:
        """Note that the stack works: from now on a part is restarted however often it dies."""
        self._is_ready = True

    def run_until(self, done: Callable[[], bool]) -> None:
        """Watch the parts until `done()`, asked at every tick.

        Raises StopRequested, or PartFailedError before `ready()`.
        """
        while True:
            self.check_stop()
            self._look()
            if done():
                return
            self._sleep()

    def check_stop(self) -> None:
        """Raise StopRequested when somebody asked to stop."""
        if self._stops:
            raise StopRequested

    def stop(self) -> None:
        """Stop every part; nothing that was started is left when this returns."""
        children = [w.part for w in self._watched if isinstance(w.part, ChildPart)]
        others = [w.part for w in self._watched if not isinstance(w.part, ChildPart)]
        for part in children:
            part.ask_to_stop()
        seen = self._stops
        deadline = time.monotonic() + STOP_SECONDS_MAX
        while any(part.pid is not None for part in children) and time.monotonic() < deadline:
            if self._stops > seen:
                self._say("killing what still runs")
                break
            self._sleep()
        for part in children:
            part.stop(0.0)
        for server in reversed(others):
            server.stop(STOP_SECONDS_MAX)
        self._watched.clear()

    def _look(self) -> None:
        for watched in self._watched:
            if watched.part.pid is not None:
                continue
            if not watched.is_down:
                self._note_death(watched)
            elif watched.backoff.is_due:
                self._restart(watched)
        if time.monotonic() - self._trimmed_at > TRIM_SECONDS:
            self._trimmed_at = time.monotonic()
            for watched in self._watched:
                watched.part.log.trim()

    def _note_death(self, watched: _Watched, why: str | None = None) -> None:
        part = watched.part
        part.end_rest()
        watched.is_down = True
        pause = watched.backoff.died()
        reason = why or _reason(part)
        if not self._is_ready and watched.backoff.deaths >= FIRST_DEATHS_MAX:
            msg = (
                f"{part.name} {reason}, the {FIRST_DEATHS_MAX}th time in a row; the end of "
                f"{part.log.path}:\n{part.log.tail()}"
            )
            raise PartFailedError(msg)
        self._say(f"{part.name} {reason}; it starts again in {pause:g} s (log: {part.log.path})")

    def _restart(self, watched: _Watched) -> None:
        try:
            watched.part.start()
        # A server that does not come up now may come up later; the supervisor must live on.
        except Exception as error:  # noqa: BLE001
            self._note_death(watched, f"could not start ({error})")
            return
        watched.is_down = False
        watched.backoff.started()
        self._say(f"{watched.part.name} runs again")

    def _sleep(self) -> None:
        if self._wakeup is None:
            time.sleep(TICK_SECONDS)
            return
        reader = self._wakeup[0]
        if select.select([reader], [], [], TICK_SECONDS)[0]:
            os.read(reader, 4096)

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stops += 1


def print_line(line: str) -> None:
    """Print a line at once, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _reason(part: Part) -> str:
    status = part.exit_status if isinstance(part, ChildPart) else None
    if status is None:
        return "stopped"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
