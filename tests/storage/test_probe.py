"""StoreProbe: an answer within its seconds, whatever the store does."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.storage import ObjectStore, StoreProbe, open_store
from tests.fixtures.away import store_away

__all__ = ["store_away"]


def test_a_store_that_is_there_answers_and_one_that_is_away_does_not(
    object_store_url: str, tmp_path: Path, store_away: ObjectStore
) -> None:
    store = open_store(object_store_url)
    probe = StoreProbe(store)
    assert probe.answers()
    folder = tmp_path / "objects"
    folder.rename(tmp_path / "elsewhere")
    assert not probe.answers(), "a folder that was unmounted"
    (tmp_path / "elsewhere").rename(folder)
    assert probe.answers()
    assert not StoreProbe(store_away).answers()


def test_a_store_that_hangs_is_asked_once_and_keeps_nobody(
    object_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(object_store_url)
    back, asked = threading.Event(), []

    def hang() -> None:
        asked.append(1)
        assert back.wait(30)

    monkeypatch.setattr(store, "check", hang)
    probe = StoreProbe(store)
    with ThreadPoolExecutor(8) as threads:
        assert not any(threads.map(probe.answers, [0.01] * 8))
        assert len(asked) == 1
    back.set()
    assert probe.answers(30)
