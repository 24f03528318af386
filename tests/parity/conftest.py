"""Models, engines and the reference process that the tests of this folder share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import engine_for
from tests.models.families import FAMILIES, make_tiny_model
from tests.parity.comparing import Reference
from tests.reference import process
from worker.engine.vllm_engine import VllmEngine

BLOCK = 32
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"blocks": 600},
    # Prompts go in chunks of 48 tokens at most, and there is room for 6 blocks.
    "tight": {"blocks": 6, "max_model_len": 128, "max_num_batched_tokens": 48, "max_num_seqs": 16},
    "compiled": {"blocks": 600, "mode": "compiled"},
    "bfloat16": {"blocks": 600, "dtype": "bfloat16"},
}


@pytest.fixture(scope="session")
def reference_process() -> Iterator[ProcessPoolExecutor]:
    """The process in which transformers is left as it is."""
    with process.start() as pool:
        yield pool


@pytest.fixture(scope="session")
def model_of(
    tmp_path_factory: pytest.TempPathFactory, reference_process: ProcessPoolExecutor
) -> Callable[[str], Path]:
    """Make the tiny model of a family, once."""
    folder = tmp_path_factory.mktemp("families")

    def make(family: str) -> Path:
        if not (folder / family).exists():
            reference_process.submit(make_tiny_model, family, folder / family).result()
        return folder / family

    return make


class Engines:
    """The one engine that may live in this process; another one takes its place."""

    def __init__(self, model_of: Callable[[str], Path], scratch: Callable[[str], Path]) -> None:
        self._model_of = model_of
        self._scratch = scratch
        self._key: tuple[str, str] | None = None
        self._stack = contextlib.ExitStack()
        self._engine: VllmEngine | None = None

    def get(self, family: str, kind: str) -> VllmEngine:
        """Return the engine of a family and kind, started unless it is the one that runs."""
        if self._engine is not None and self._key == (family, kind):
            return self._engine
        self.close()
        changes = {"max_model_len": 192, **ENGINES[kind]}
        blocks = changes.pop("blocks")
        room = blocks * FAMILIES[family].block_bytes(BLOCK)
        starting = engine_for(
            self._model_of(family), self._scratch("scratch"), kv_cache_bytes=room, **changes
        )
        self._engine = self._stack.enter_context(starting)
        self._key = (family, kind)
        return self._engine

    def close(self) -> None:
        """Shut the engine down, if there is one."""
        self._engine = None
        self._stack.close()


@pytest.fixture(scope="package")
def engines(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """Keep one engine for the tests that follow each other with the same family and kind."""
    kept = Engines(model_of, tmp_path_factory.mktemp)
    yield kept
    kept.close()


@pytest.fixture
def engine(request: pytest.FixtureRequest, engines: Engines) -> VllmEngine:
    """The engine of a (family, kind)."""
    return engines.get(*request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests with the same engine follow each other: a start takes seconds."""
    places = [place for place, item in enumerate(items) if _engine_of(item)]
    for place, item in zip(places, sorted((items[k] for k in places), key=_engine_of), strict=True):
        items[place] = item


def _engine_of(item: pytest.Item) -> tuple[str, str] | None:
    if Path(__file__).parent not in item.path.parents:
        return None
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("engine")


@pytest.fixture
def reference(
    engine: VllmEngine,
    reference_process: ProcessPoolExecutor,
    model_of: Callable[[str], Path],
) -> Reference:
    """The reference of the engine's model."""
    return Reference(reference_process, model_of(engine.facts.model))
