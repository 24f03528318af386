"""Compiled mode: its code is made once a machine, and a machine that cannot make it says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.source_tree import ROOT
from worker.engine import environment
from worker.engine.environment import UnsupportedEngineError, check_compiling, usual_mode


def started(model: Path, scratch: Path, cache: Path) -> list[int]:
    """Start in a new process; give hits, misses and bypasses of the cache of compiled code."""
    words = [sys.executable, "-m", "tests.engine.start_compiled", str(model)]
    names = ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = subprocess.run(
        [*words, str(scratch), str(cache)],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    counts: list[int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def test_the_second_start_compiles_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    hits, misses, bypassed = started(tiny_llama, tmp_path / "first", cache)
    assert (hits, bypassed) == (0, 0)
    assert misses > 0
    assert list((cache / "inductor").rglob("*.so"))
    again = started(tiny_llama, tmp_path / "second", cache)
    assert again == [misses, 0, 0]


def test_without_a_compiler_models_are_added_as_eager_and_compiled_ones_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert usual_mode() == "compiled"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert usual_mode() == "eager"
    with pytest.raises(UnsupportedEngineError) as refused:
        check_compiling()
    assert "no-such-compiler" in str(refused.value)
    assert 'mode = "eager" in models.toml' in str(refused.value)


def test_a_cache_that_cannot_be_written_is_named_at_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UnsupportedEngineError, match="TILLER_CACHE_DIR"):
        check_compiling(file / "compiled")


def test_without_headers_of_python_models_are_added_as_eager(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda _name: str(tmp_path))
    assert usual_mode() == "eager"
    with pytest.raises(UnsupportedEngineError, match=r"Python\.h"):
        check_compiling()
