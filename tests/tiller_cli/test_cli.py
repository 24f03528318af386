"""The command line hands commands over, and says clearly when it cannot."""

import importlib.util
import sys

import pytest

from tiller import __version__
from tiller.cli import main


class Replaced:
    """Stands where os.execv stands, and keeps what it was told."""

    def __init__(self):
        self.words = None

    def __call__(self, program, words):
        assert program == words[0] == sys.executable
        self.words = words[1:]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["up", "--port", "0"], ["-m", "app", "up", "--port", "0"]),
        (["models", "add", "x"], ["-m", "worker.models", "add", "x"]),
    ],
)
def test_commands_of_the_service_replace_this_process(words, expected):
    replaced = Replaced()
    main(words, replace=replaced)
    assert replaced.words == expected


def test_a_missing_extra_is_named_with_its_cure(monkeypatch, capsys):
    found = importlib.util.find_spec
    without = {"celery", "uvicorn"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in without else found(name)
    )
    replaced = Replaced()
    assert main(["up"], replace=replaced) == 1
    assert replaced.words is None
    said = capsys.readouterr().err
    assert "uvicorn, celery" in said
    assert "pip install 'tiller[worker]'" in said


def test_an_unknown_command_is_refused_with_the_list(capsys):
    assert main(["fly"]) == 2
    said = capsys.readouterr().err
    assert "'fly'" in said
    assert "up " in said


def test_help_and_version_work_without_the_service(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    assert main([]) == 2
    assert __version__ in capsys.readouterr().out
