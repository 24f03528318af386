"""Runs tests in a copy of the repository, in a process that is forked after the slow imports.

Importing torch and vLLM takes longer than most of the tests. So they are imported once, nothing of
ours is, and each trial is a fork that imports ours from the copy that it is told.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from worker.engine.environment import prepare_environment

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

OURS = ("app", "worker", "tiller", "migrations", "tests")
_SLOW = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "fastapi",
    "hypothesis",
)
_SAID_MAX = 3000
PASSED, FAILED = 0, 1


def import_slow_modules() -> None:
    """Import what trials share; some of it is not there on every machine."""
    prepare_environment()
    for name in _SLOW:
        with suppress(ImportError):
            importlib.import_module(name)


class Trial:
    """Tests that run in `copy`, begun at once."""

    def __init__(self, copy: Path, names: Sequence[str]) -> None:
        """Start pytest for `names` (node ids), stopping at the first failure."""
        self._report = copy / "report.txt"
        self._process: ForkProcess = multiprocessing.get_context("fork").Process(
            target=_run, args=(copy, tuple(names), self._report)
        )
        self._process.start()

    def result(self, seconds: float) -> tuple[int, str]:
        """Wait for the exit status of pytest and the end of what it said; 1 when it hangs."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
            return FAILED, f"\nFAILED the tests did not end within {seconds:.0f} s"
        said = self._report.read_text(encoding="utf-8", errors="replace")
        return self._process.exitcode or PASSED, said[-_SAID_MAX:]


def _run(copy: Path, names: tuple[str, ...], report: Path) -> None:
    with report.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    here = Path.cwd()
    os.chdir(copy)
    for name in list(sys.modules):
        if name.split(".")[0] in OURS:
            del sys.modules[name]
    sys.path[:] = [str(copy), *(path for path in sys.path if (here / path).resolve() != here)]
    # Two changes of one file within a second would share their bytecode.
    sys.dont_write_bytecode = True
    # pytest minds that plugins are imported already: their own asserts are of no interest here.
    calm = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *calm, *names])
    sys.stdout.flush()
    os._exit(int(status))
