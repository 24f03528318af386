"""A question that is asked in a thread of its own: late answers, and no thread to be had."""

import threading

import pytest

from app.kit.question import Question

WAIT_SECONDS = 20.0


def test_without_a_thread_the_question_fails_at_once_and_is_asked_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = Question(lambda: "here", name="asked")

    def no_thread(_: threading.Thread) -> None:
        msg = "can't start new thread"
        raise RuntimeError(msg)

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            question.answer(WAIT_SECONDS)
        with pytest.raises(RuntimeError, match="new thread"):
            question.answer(WAIT_SECONDS)
    assert question.answer(WAIT_SECONDS) == "here"


def test_an_answer_that_nobody_waited_for_is_kept() -> None:
    go_on = threading.Event()

    def ask() -> str:
        assert go_on.wait(WAIT_SECONDS)
        return "late"

    question = Question(ask, name="asked")
    assert question.latest(WAIT_SECONDS) is None
    with pytest.raises(TimeoutError):
        question.answer(0)
    assert question.latest(WAIT_SECONDS) is None
    asked = question.begin()
    go_on.set()
    assert asked.result(WAIT_SECONDS) == "late"
    found = question.latest(WAIT_SECONDS)
    assert found is not None
    assert found[0] >= 0
    assert found[1] == "late"
    assert question.latest(0) is None, "it is too old"


def test_a_failure_does_not_take_the_latest_answer_away() -> None:
    answers = iter(["good"])
    question = Question(lambda: next(answers), name="asked")
    assert question.answer(WAIT_SECONDS) == "good"
    with pytest.raises(StopIteration):
        question.answer(WAIT_SECONDS)
    found = question.latest(WAIT_SECONDS)
    assert found is not None
    assert found[1] == "good"
