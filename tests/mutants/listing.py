"""Reads mutants.toml: one small change of one source file each, and the tests that must fail."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.rules.source_tree import ROOT

FILE = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """`old` stands in `file` exactly once; `tests` are node ids of pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return the changed text of the file; raise ValueError when `old` is not there once."""
        count = text.count(self.old)
        if count != 1:
            msg = f"{self.name}: {self.file} holds {self.old!r} {count} times, not once"
            raise ValueError(msg)
        return text.replace(self.old, self.new)


def read_mutants() -> tuple[Mutant, ...]:
    """Read all mutants."""
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))["mutant"]
    return tuple(Mutant(**{**table, "tests": tuple(table["tests"])}) for table in tables)


def source_of(mutant: Mutant) -> str:
    """Return the text that a mutant changes."""
    return (ROOT / mutant.file).read_text(encoding="utf-8")
