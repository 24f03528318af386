"""Every example of README.md and docs/completions.md that speaks to a service, run as it stands.

curl examples end well unless the paragraph before them names another status; where an answer is
printed behind an example, the real one has its form, and a refusal its very words.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rules.source_tree import ROOT
from tests.seed_contract.asking import NEEDS_SERVICE

pytestmark = NEEDS_SERVICE

PAGES = ("README.md", "docs/completions.md")
# Adds the status as the last line of what curl prints; nothing else about it changes.
REPORTING = """
set -euo pipefail
curl() { command curl --silent --show-error --write-out '\\n%{http_code}\\n' "$@"; }
"""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STATUS = re.compile(r"\b[45]\d\d\b")


@dataclass(frozen=True)
class Example:
    """A block of a page: its program, the status that is named before it, the answer behind it."""

    name: str
    program: str
    status: str
    printed: Any


def examples(kind: str, word: str) -> list[Example]:
    """List the blocks of one kind that hold a word."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = list(BLOCK.finditer(text))
        for place, block in enumerate(blocks):
            if block[1] != kind or word not in block[2]:
                continue
            named = STATUS.findall(text[: block.start()].rstrip().rpartition("\n\n")[2])
            follows = blocks[place + 1] if place + 1 < len(blocks) else None
            printed = None
            if follows and follows[1] == "json" and not text[block.end() : follows.start()].strip():
                printed = json.loads(follows[2])
            line = text.count("\n", 0, block.start()) + 1
            found.append(
                Example(f"{page}:{line}", block[2], named[-1] if named else "200", printed)
            )
    return found


def names(example: Example) -> str:
    return example.name


def environment(credentials: dict[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "TILLER_API_BASE": credentials["api_base"],
        "TILLER_API_KEY": credentials["api_key"],
    }


def form(value: Any) -> Any:
    """Reduce JSON to its keys and types, as far as an example must tell them."""
    if isinstance(value, dict):
        return {key: form(item) for key, item in value.items()}
    return [form(item) for item in value] if isinstance(value, list) else type(value)


CURL = examples("sh", "curl ")
PYTHON = examples("python", "TILLER_API_BASE") + examples("python", "decode(encode(")


def test_there_are_examples_of_each_kind():
    programs = " ".join(example.program for example in CURL)
    assert len(CURL) >= 4
    assert len(PYTHON) >= 2
    for part in ('"stream": true', "apply_steering_vectors", "output_residual_stream"):
        assert part in programs
    assert {example.status for example in CURL} >= {"200", "400"}


@pytest.mark.parametrize("example", CURL, ids=names)
def test_a_curl_example_gives_what_its_text_says(
    credentials: dict[str, str], tmp_path: Path, example: Example
) -> None:
    done = subprocess.run(
        ["bash", "-c", REPORTING + example.program],
        env=environment(credentials),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    body, _, status = done.stdout.rstrip("\n").rpartition("\n")
    assert status == example.status, done.stdout[-2000:]
    if '"stream": true' in example.program:
        events = body.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert "".join(c["text"] for chunk in chunks for c in chunk["choices"])
        return
    answer = json.loads(body)
    if example.printed is not None:
        assert form(answer) == form(example.printed)
        assert answer.get("error") == example.printed.get("error")


@pytest.mark.parametrize("example", PYTHON, ids=names)
def test_a_python_example_runs(credentials: dict[str, str], tmp_path: Path, example: Example):
    done = subprocess.run(
        [sys.executable, "-c", example.program],
        env={**environment(credentials), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
