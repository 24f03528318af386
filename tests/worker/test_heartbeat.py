"""The speedometer and the stop events: small parts of a worker that other decisions rest on."""

import threading

import pytest

from worker.heartbeat import Speedometer
from worker.stopping import Stopping


def test_the_speedometer_counts_busy_time_only(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    speed = Speedometer(window_seconds=30, gap_seconds=2, tokens_min=200)
    assert speed.tokens_per_second() is None
    speed.add(150)
    assert speed.tokens_per_second() is None, "one small request says nothing about speed"
    now = 1001.0
    speed.add(150)
    assert speed.tokens_per_second() == pytest.approx(300 / 3)
    now = 5000.0
    assert speed.tokens_per_second() == pytest.approx(100.0), "an idle worker is not a slow one"
    speed.add(100)
    assert speed.tokens_per_second() == pytest.approx(400 / 5)
    for _ in range(40):
        now += 1.0
        speed.add(50)
    assert speed.tokens_per_second() == pytest.approx(50.0), "what lies long back is forgotten"


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
