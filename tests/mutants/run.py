"""Applies one mutant at a time to a copy of the repository and runs the tests that must see it.

    python -m tests.mutants.run [--only WORDS]

The working tree is never touched. First the tests run on the unchanged copy and must pass; then
each mutant must make at least one of its tests fail. Exits with 1 when a mutant survives, and
when its tests could not run (a test that is not there proves nothing).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.listing import Mutant, read_mutants
from tests.mutants.trial import FAILED, OURS, PASSED, Trial, import_slow_modules
from tests.rules.source_tree import ROOT

SECONDS_MAX = 300  # a mutant that makes its tests hang is seen, too
_ALL_SECONDS_MAX = 1800


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: "killed", "survived" or "not run", and what pytest said."""

    mutant: Mutant
    fate: str
    seconds: float
    said: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants, print a line for each, return the exit status."""
    options = _options(arguments)
    mutants = [item for item in read_mutants() if options.only in item.name]
    if not mutants:
        _say(f"no mutant has {options.only!r} in its name")
        return 1
    began = time.monotonic()
    import_slow_modules()
    with tempfile.TemporaryDirectory(prefix="tiller-mutants-") as folder:
        copy = _copy(Path(folder) / "copy")
        if not _unchanged_passes(copy, mutants):
            return 1
        verdicts = []
        for mutant in mutants:
            verdicts.append(_judge(mutant, copy))
            _say(f"{verdicts[-1].fate:9} {verdicts[-1].seconds:5.0f} s  {mutant.name}")
    for verdict in verdicts:
        if verdict.fate != "killed":
            _say(f"\n{verdict.mutant.name}: {verdict.fate}\n{verdict.said}")
    killed = sum(verdict.fate == "killed" for verdict in verdicts)
    seconds, burnt = time.monotonic() - began, os.times()
    used = sum(burnt[:4])
    _say(f"\n{killed} of {len(verdicts)} mutants killed in {seconds:.0f} s ({used:.0f} s of work)")
    return 0 if killed == len(verdicts) else 1


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 (a report for a person)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the mutants with these words in their name")
    return parser.parse_args(arguments)


def _copy(target: Path) -> Path:
    target.mkdir()
    for name in OURS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def _unchanged_passes(copy: Path, mutants: Sequence[Mutant]) -> bool:
    """Whether all tests pass without a mutant; what fails anyway would see nothing."""
    names = sorted({name for mutant in mutants for name in mutant.tests})
    began = time.monotonic()
    status, said = Trial(copy, names).result(_ALL_SECONDS_MAX)
    _say(f"{'unchanged':9} {time.monotonic() - began:5.0f} s  {len(names)} tests")
    if status != PASSED:
        _say(f"the tests do not pass without any mutant:\n{said}")
    return status == PASSED


def _judge(mutant: Mutant, copy: Path) -> Verdict:
    file, began = copy / mutant.file, time.monotonic()
    text = file.read_text(encoding="utf-8")
    status: int | None = None
    try:
        file.write_text(mutant.applied(text), encoding="utf-8")
        status, said = Trial(copy, mutant.tests).result(SECONDS_MAX)
    except ValueError as error:
        said = str(error)
    finally:
        file.write_text(text, encoding="utf-8")
    # Failing to start is not the same as being seen by a test.
    seen = status == FAILED and "\nFAILED " in said
    fate = "killed" if seen else "survived" if status == PASSED else "not run"
    return Verdict(mutant, fate, time.monotonic() - began, said)


if __name__ == "__main__":
    sys.exit(main())
