"""Reads our Dockerfile: stages, and the instructions of each, as the builder would see them.

Only what the file uses is understood; anything else raises ValueError, so that a new instruction
is not silently left out of the checks.
"""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_KNOWN = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER",
    "WORKDIR",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction: its word and the rest of its line."""

    word: str
    rest: str

    def exec_form(self) -> list[str]:
        """Give the words of a CMD or ENTRYPOINT. Raises TypeError when it is not a JSON list."""
        text = self.rest[self.rest.index("[") :] if "[" in self.rest else self.rest
        words = json.loads(text)
        if not isinstance(words, list):
            raise TypeError(f"{self.word} is not in exec form: {self.rest}")
        return words

    def assignments(self) -> dict[str, str]:
        """Give the names and values of an ENV."""
        return dict(word.split("=", 1) for word in shlex.split(self.rest))


@dataclass(slots=True)
class Stage:
    """One FROM and what follows it."""

    name: str
    parent: str
    steps: list[Step] = field(default_factory=list)

    def last(self, word: str) -> Step | None:
        """Give the last instruction of a kind."""
        return next((step for step in reversed(self.steps) if step.word == word), None)


def read_stages(path: Path) -> dict[str, Stage]:
    """Read every stage in the order of the file."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = re.sub(r"\\\n\s*", "", text)
    stages: dict[str, Stage] = {}
    defaults: dict[str, str] = {}
    current: Stage | None = None
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word not in _KNOWN:
            raise ValueError(f"this reader does not know {word}: {line}")
        if word == "FROM":
            parent, as_word, name = rest.split()
            assert as_word == "AS"
            for key, value in defaults.items():
                parent = parent.replace(f"${{{key}}}", value)
            current = stages[name] = Stage(name, parent)
        elif current is None:
            assert word == "ARG"
            key, _, value = rest.partition("=")
            defaults[key] = value
        else:
            current.steps.append(Step(word, rest))
    return stages


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """List a stage and those it is built upon, the first one first."""
    line = [stages[name]]
    while line[0].parent in stages:
        line.insert(0, stages[line[0].parent])
    return line
