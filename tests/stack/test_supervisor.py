"""The supervisor: restarts with growing pauses, and nothing that outlives it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.stack import part as part_module
from app.stack.log_file import KEPT, LogFile
from app.stack.part import PAUSE_SECONDS_MAX, STABLE_SECONDS, Backoff
from tests.rules.source_tree import ROOT
from tests.stack.waiting import wait_for

# A part that starts an "engine" of its own and notes both process ids, one pair a start.
PART_WITH_ENGINE = """
import os, subprocess, sys, time
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("pids", "a") as file:
    file.write(f"{os.getpid()} {engine.pid}\\n")
time.sleep(600)
"""
# As above, but neither of the two minds SIGTERM, and the engine leaves the session.
STUBBORN_PART = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
engine = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
)
with open("pids", "a") as file:
    file.write(f"{os.getpid()} {engine.pid}\\n")
time.sleep(600)
"""
BROKEN_PART = "raise SystemExit('the flux is missing')"


class Small:
    """A small stack in a folder, seen from outside."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.stack.small_stack", str(folder), script],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pids(self, start: int = 1) -> list[psutil.Process]:
        """Part and engine of the start with that number."""
        file = self.folder / "pids"
        wait_for(lambda: file.exists() and file.read_text().count("\n") >= start, "a start")
        return [psutil.Process(int(pid)) for pid in file.read_text().splitlines()[-1].split()]

    def finish(self) -> str:
        printed, _ = self.process.communicate(timeout=40)
        return printed


@pytest.fixture
def small(tmp_path):
    started = []

    def start(script: str) -> Small:
        started.append(Small(tmp_path, script))
        return started[-1]

    yield start
    for stack in started:
        if stack.process.poll() is None:
            stack.process.kill()
        stack.process.communicate()


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_engine_does_not_outlive_a_killed_worker(small):
    stack = small(PART_WITH_ENGINE)
    worker, engine = stack.pids()
    wait_for((stack.folder / "ready").exists, "ready")
    worker.kill()
    new_worker, new_engine = stack.pids(start=2)
    assert is_gone(worker)
    assert is_gone(engine), "the engine was still there when its worker had started again"
    assert not is_gone(new_worker)
    assert not is_gone(new_engine)


def test_a_killed_supervisor_leaves_no_process_and_no_promise(small):
    stack = small(STUBBORN_PART)
    processes = stack.pids()
    wait_for((stack.folder / "ready").exists, "ready")
    stack.process.kill()
    wait_for(lambda: all(map(is_gone, processes)), "the guardian", 10)
    assert not (stack.folder / "ready").exists()


def test_a_second_ctrl_c_kills_what_does_not_stop(small):
    stack = small(STUBBORN_PART.replace("start_new_session=True", ""))
    processes = stack.pids()
    wait_for((stack.folder / "ready").exists, "ready")
    started = time.monotonic()
    stack.process.send_signal(signal.SIGINT)
    while stack.process.poll() is None:
        stack.process.send_signal(signal.SIGINT)
        assert time.monotonic() < started + 30
        time.sleep(0.1)  # a person's finger, not a wait for anything
    assert "killing what still runs" in stack.finish()
    assert all(map(is_gone, processes))


def test_a_part_that_never_starts_is_given_up_with_its_last_words(small):
    stack = small(BROKEN_PART)
    printed = stack.finish()
    assert stack.process.returncode == 1
    assert "the flux is missing" in printed
    assert "starts again in 0.5 s" in printed
    assert "starts again in 1 s" in printed


def test_pauses_double_up_to_a_bound_and_start_over_after_a_stable_run(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(part_module.time, "monotonic", lambda: now)
    backoff = Backoff()
    pauses = []
    for _ in range(9):
        backoff.started()
        now += 1
        pauses.append(backoff.died())
        assert not backoff.is_due
        now += pauses[-1]
        assert backoff.is_due
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert pauses[-1] == PAUSE_SECONDS_MAX
    backoff.started()
    now += STABLE_SECONDS
    assert backoff.died() == 0.5


def test_logs_are_rotated_and_bounded(tmp_path, monkeypatch):
    log = LogFile(tmp_path / "logs" / "part.log")
    for number in range(KEPT + 3):
        log.rotate()
        with log.open() as stream:
            stream.write(f"start {number}".encode())
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["part.log", *(f"part.log.{number}" for number in range(1, KEPT + 1))]
    assert log.tail() == f"start {KEPT + 2}"
    assert (tmp_path / "logs/part.log.1").read_text() == f"start {KEPT + 1}"
    monkeypatch.setattr("app.stack.log_file.BYTES_MAX", 10)
    with log.open() as stream:
        stream.write(b" and more than ten bytes")
        stream.flush()
        log.trim()
        stream.write(b"after")
    assert log.path.read_bytes() == b"after"
    assert "more than ten" in (tmp_path / "logs/part.log.1").read_text()
