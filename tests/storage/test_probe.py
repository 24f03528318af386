"""A question to the object store: an answer within its seconds, whatever the store does."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.kit.question import Question
from app.storage import ObjectStore, open_store
from tests.fixtures.away import store_away

__all__ = ["store_away"]


def answers(probe: Question[None], seconds: float = 3.0) -> bool:
    """Tell whether the store answers in time."""
    try:
        probe.answer(seconds)
    except Exception:  # noqa: BLE001 (whatever a store raises, it is away)
        return False
    return True


def asked_of(store: ObjectStore) -> Question[None]:
    """Make the question whether a store is there."""
    return Question(store.check, name="store")


def test_a_store_that_is_there_answers_and_one_that_is_away_does_not(
    object_store_url: str, tmp_path: Path, store_away: ObjectStore
) -> None:
    probe = asked_of(open_store(object_store_url))
    assert answers(probe)
    folder = tmp_path / "objects"
    folder.rename(tmp_path / "elsewhere")
    assert not answers(probe), "a folder that was unmounted"
    (tmp_path / "elsewhere").rename(folder)
    assert answers(probe)
    assert not answers(asked_of(store_away))


def test_a_store_that_hangs_is_asked_once_and_keeps_nobody(
    object_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(object_store_url)
    back, begun, asked = threading.Event(), threading.Event(), []

    def hang() -> None:
        asked.append(1)
        begun.set()
        assert back.wait(30)

    monkeypatch.setattr(store, "check", hang)
    probe = asked_of(store)
    with ThreadPoolExecutor(8) as threads:
        assert not any(threads.map(lambda _: answers(probe, 0.01), range(8)))
    assert begun.wait(30)
    assert len(asked) == 1
    back.set()
    assert answers(probe, 30)
