"""The tiny model and its engines, as the tests of the engine have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import engine, tiny_llama
from tests.engine.engines import engine_for
from worker.engine.vllm_engine import VllmEngine

__all__ = ["engine", "small_steps", "tiny_llama"]


@pytest.fixture(scope="module")
def small_steps(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine with 12 KV blocks of 32 tokens, 64 tokens a step, 6 requests at a time."""
    with engine_for(
        tiny_llama,
        tmp_path_factory.mktemp("scratch"),
        kv_cache_bytes=12 * 65_536,
        max_num_batched_tokens=64,
        max_num_seqs=6,
    ) as started:
        yield started
