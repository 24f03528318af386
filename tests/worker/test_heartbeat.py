"""The speedometer and the stop events: small parts of a worker that other decisions rest on."""

import threading

import pytest

from worker.heartbeat import Speedometer
from worker.stopping import Stopping


def test_the_speedometer_gives_the_mean_over_its_window(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    speed = Speedometer(window_seconds=30)
    assert speed.tokens_per_second() == 0.0
    speed.add(100)
    assert speed.tokens_per_second() == 100.0, "less than a second counts as one"
    now = 1010.0
    speed.add(100)
    assert speed.tokens_per_second() == pytest.approx(20.0)
    now = 1035.0
    assert speed.tokens_per_second() == pytest.approx(100 / 25), "the first mark is forgotten"
    now = 1100.0
    assert speed.tokens_per_second() == 0.0


def test_a_soft_stop_becomes_hard_when_its_time_is_over(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stopping = Stopping(20.0)
    assert not stopping.is_soft
    stopping.request("first")
    now = 19.0
    stopping.request("second")
    assert (stopping.is_soft, stopping.is_hard, stopping.reason) == (True, False, "first")
    now = 20.0
    assert stopping.is_hard, "a second request does not lengthen the first"


def test_whoever_waits_without_a_limit_is_told_of_the_stop():
    stopping = Stopping(20.0)
    heard = threading.Event()
    thread = threading.Thread(target=lambda: stopping.wait() and heard.set())
    thread.start()
    stopping.abort("now")
    assert heard.wait(5)
    thread.join(5)
    assert stopping.is_hard
