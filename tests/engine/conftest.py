"""Models and engines shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.engines import engine_for
from tests.engine.tiny_model import make_tiny_llama
from worker.engine.vllm_engine import VllmEngine


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in float32: 4 layers, width 64."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An in-process engine with the tiny model, one a test module."""
    with engine_for(tiny_llama, tmp_path_factory.mktemp("scratch")) as started:
        yield started
