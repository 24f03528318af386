"""The command line. Commands that run a service belong to the extras and are handed over to them.

    tiller up           -> python -m app up              (extra: server, and worker for an engine)
    tiller models add   -> python -m worker.models add   (extra: worker)

This package contains no server code: a handed-over command replaces this process, so signals and
exit status are the command's own.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiller import __version__

Replace = Callable[[str, list[str]], object]


@dataclass(frozen=True, slots=True)
class Handed:
    """A command of another package: what runs it, what must be installed for it."""

    module: str
    words: tuple[str, ...]
    needs: tuple[str, ...]
    extra: str
    summary: str


COMMANDS = {
    "up": Handed(
        module="app",
        words=("up",),
        needs=("app", "worker", "uvicorn", "celery", "psycopg"),
        extra="worker",
        summary="run the whole service on this machine",
    ),
    "models": Handed(
        module="worker.models",
        words=(),
        needs=("worker", "pydantic_settings", "tokenizers"),
        extra="worker",
        summary="add a model to a data folder (tiller models add NAME)",
    ),
}


def main(arguments: Sequence[str] | None = None, *, replace: Replace = os.execv) -> int:
    """Run one command; return the exit status (a handed-over command does not return)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"tiller {__version__}\n")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        sys.stderr.write(f"tiller: there is no command {words[0]!r}\n\n{_help()}")
        return 2
    missing = [name for name in command.needs if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"tiller {words[0]} needs the service, and {', '.join(missing)} cannot be found. "
            f"Install it with: pip install 'tiller[{command.extra}]'\n"
        )
        return 1
    replace(sys.executable, [sys.executable, "-m", command.module, *command.words, *words[1:]])
    return 0


def _help() -> str:
    lines = "".join(f"  {name:<8} {command.summary}\n" for name, command in COMMANDS.items())
    return f"usage: tiller COMMAND …\n\n{lines}\n`tiller COMMAND --help` explains a command.\n"
