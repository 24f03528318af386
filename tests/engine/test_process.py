"""A served engine lives in processes of its own, and they end with the process that started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.engine.watching import until

ROOT = Path(__file__).parents[2]


def test_kill_9_of_the_parent_leaves_no_engine_process(tiny_llama: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.engine.serve_tiny", str(tiny_llama), str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert any(line.strip() == "proven" for line in parent.stdout)
            children = psutil.Process(parent.pid).children(recursive=True)
        finally:
            parent.kill()
            parent.wait()
    assert children
    until(lambda: not any(map(alive, children)), seconds=10)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
