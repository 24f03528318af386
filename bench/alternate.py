"""Sides that take turns: each engine in a process of its own, all alive through the whole run.

A busy or slow moment of the machine then hits all sides alike. Turns and answers travel as lines
of JSON through the process's own input and output.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.workload import Load, Turn, turn_to_line

STOP_SECONDS = 30.0
Speeds = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where models run and with which threads: see bench.engine_sides.SideConfig."""

    in_process: bool = False
    binding: str = "same"

    def __str__(self) -> str:
        where = "in its client's process" if self.in_process else "in a process of its own"
        return f"ours ran {where}, the others with threads {_BINDINGS[self.binding]}"


_BINDINGS = {"same": "set as ours are", "auto": "bound as vLLM does by default"}


def add_setting(parser: argparse.ArgumentParser) -> None:
    """Let the command line choose a Setting."""
    words = "run our model in its client's process, not in one of its own as it is served"
    parser.add_argument("--in-process", action="store_true", help=words)
    words = "threads of plain vLLM and vllm-lens: the same as ours, or vLLM's own choice"
    parser.add_argument("--binding", choices=list(_BINDINGS), default="same", help=words)


class SideFailedError(Exception):
    """The process of a side ended; what it said is above, on standard error."""


class Side:
    """One engine in its process."""

    def __init__(
        self, kind: str, folder: Path, *, mode: str, load: Load, setting: Setting, python: Path
    ) -> None:
        """Start loading the model of `folder`; `wait_ready` waits for it."""
        self.kind = kind
        config = {"kind": kind, "folder": str(folder), "mode": mode}
        words = json.dumps({**config, **asdict(setting), "load": asdict(load)})
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.engine_sides", words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> None:
        """Wait until the model is loaded."""
        self._answer()

    def run(self, turn: Turn) -> float:
        """Let it run a turn; give tokens a second."""
        assert self._process.stdin is not None
        self._process.stdin.write(turn_to_line(turn) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            msg = f"the {self.kind} side ended with status {self._process.wait()}"
            raise SideFailedError(msg)
        answer: dict[str, float] = json.loads(line)
        return answer["tokens_per_s"]


@contextlib.contextmanager
def sides(
    kinds: Sequence[str],
    folder: Path,
    *,
    mode: str,
    load: Load,
    setting: Setting,
    pythons: Mapping[str, Path],
) -> Iterator[dict[str, Side]]:
    """Start a side of each kind, one after the other, and end them all."""
    started: dict[str, Side] = {}
    try:
        for kind in kinds:
            python = pythons.get(kind, Path(sys.executable))
            side = Side(kind, folder, mode=mode, load=load, setting=setting, python=python)
            started[kind] = side
            side.wait_ready()
        yield started
    finally:
        for side in started.values():
            side.stop()


def alternate(
    running: Mapping[str, Side], turns: Sequence[tuple[str, Turn]], repeats: int, label: str
) -> Speeds:
    """Run all turns in order, `repeats` times; give the tokens a second of each by its name.

    A round before the first warms all sides and does not count.
    """
    speeds: Speeds = {}
    for number in range(repeats + 1):
        for kind, turn in turns:
            speed = running[kind].run(turn.at(number))
            if number:
                speeds.setdefault(turn.name, []).append(speed)
                print(f"{label} round {number} {turn.name}: {speed:.0f} tokens/s", flush=True)
    return speeds
