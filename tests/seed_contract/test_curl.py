"""Every example of the pages for users that speaks to a service, run as it stands.

curl examples answer 200 unless the paragraph before them names another status; where an answer is
printed behind an example, the real one is the same but for what differs from run to run. The
Python programs of a page that log in by credentials.json are run as one, from top to bottom.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rules.source_tree import ROOT
from tests.seed_contract.asking import NEEDS_SERVICE

pytestmark = NEEDS_SERVICE

PAGES = ("README.md", "docs/completions.md", "docs/jobs.md")
# Adds the status as the last line of what curl prints; nothing else about it changes.
REPORTING = """
set -euo pipefail
curl() { command curl --silent --show-error --write-out '\\n%{http_code}\\n' "$@"; }
"""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STATUS = re.compile(r"\b(?:20[0-4]|[45]\d\d)\b(?!,\d)")
# Other at every run, or on another machine; of these only the type is compared.
VOLATILE = frozenset(
    {"id", "job_id", "first_id", "last_id", "request_id", "created", "model_revision", "links"}
    | {"accounting", "queue_position"}
)
CONTENT_ADDRESS = "sv_"


@dataclass(frozen=True)
class Example:
    """A block of a page: its program, what statuses are named before it, the answer behind it."""

    name: str
    program: str
    statuses: frozenset[str]
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
            found.append(Example(f"{page}:{line}", block[2], frozenset(named or {"200"}), printed))
    return found


def names(example: Example) -> str:
    return example.name


def form(value: Any) -> Any:
    """Reduce JSON to its keys and types."""
    if isinstance(value, dict):
        return {key: form(item) for key, item in value.items()}
    return [form(item) for item in value] if isinstance(value, list) else type(value)


def steady(value: Any) -> Any:
    """Reduce JSON to what every run of an example must print alike."""
    if isinstance(value, dict):
        return {
            key: form(item) if changes(key, item) else steady(item) for key, item in value.items()
        }
    return [steady(item) for item in value] if isinstance(value, list) else value


def changes(key: str, value: Any) -> bool:
    if isinstance(value, str) and value.startswith(CONTENT_ADDRESS):
        return False
    return key in VOLATILE or key.endswith("_at")


def run(program: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a program to its good end; return what it printed."""
    done = subprocess.run(
        program,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_curl(program: str, folder: Path, environment: Mapping[str, str]) -> tuple[str, str]:
    """Run a curl example; return the body and the status of its answer."""
    printed = run(["bash", "-c", REPORTING + program], folder, environment)
    body, _, status = printed.rstrip("\n").rpartition("\n")
    return body, status


@pytest.fixture(scope="module")
def environment(
    credentials: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What the pages say is set: address, key, and JOB, which the first example made and ended."""
    python = Path(sys.executable).parent
    found = {
        **os.environ,
        "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TILLER_API_BASE": credentials["api_base"],
        "TILLER_API_KEY": credentials["api_key"],
    }
    first = next(example for example in CURL if example.name.startswith("docs/jobs.md"))
    body, _ = run_curl(first.program, tmp_path_factory.mktemp("job"), found)
    found["JOB"] = json.loads(body)["id"]
    wait_for(credentials, found["JOB"])
    return found


def wait_for(credentials: dict[str, str], job_id: str) -> None:
    headers = {"authorization": f"Bearer {credentials['api_key']}"}
    deadline = time.monotonic() + WAIT_SECONDS
    with httpx.Client(base_url=credentials["api_base"], headers=headers, timeout=90) as http:
        while (job := http.get(f"jobs/{job_id}?wait=30").json())["status"] != "completed":
            assert time.monotonic() < deadline, job


CURL = examples("sh", "curl ")
PYTHON = [
    example
    for word in ("TILLER_API_BASE", "decode(encode(", "json.loads(line)")
    for example in examples("python", word)
]
WAIT_SECONDS = 300.0


def programs(page: str) -> list[str]:
    """List the Python blocks of a page that take their keys from credentials.json, and after it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [block[2] for block in BLOCK.finditer(text) if block[1] == "python"]
    first = next(place for place, block in enumerate(found) if "from_credentials" in block)
    return found[first:]


def test_there_are_examples_of_each_kind():
    asked = " ".join(example.program for example in CURL)
    assert len(CURL) >= 4
    assert len(PYTHON) >= 2
    for part in ('"stream": true', "apply_steering_vectors", "output_residual_stream"):
        assert part in asked
    statuses = {status for example in CURL for status in example.statuses}
    assert statuses >= {"200", "201", "202", "400", "422"}
    for path in ("/jobs", "/jobs/$JOB/cancel", "/steering_vectors", "/tokenize"):
        assert f'$TILLER_API_BASE{path}"' in asked


@pytest.mark.parametrize("example", CURL, ids=names)
def test_a_curl_example_gives_what_its_text_says(
    environment: dict[str, str], tmp_path: Path, example: Example
) -> None:
    body, status = run_curl(example.program, tmp_path, environment)
    assert status in example.statuses, body[-2000:]
    if '"stream": true' in example.program:
        events = body.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert "".join(c["text"] for chunk in chunks for c in chunk["choices"])
        return
    answer = json.loads(body)
    if example.printed is not None:
        assert steady(answer) == steady(example.printed)


@pytest.mark.parametrize("example", PYTHON, ids=names)
def test_a_python_example_runs(environment: dict[str, str], tmp_path: Path, example: Example):
    run([sys.executable, "-c", example.program], tmp_path, environment)


@pytest.mark.parametrize(
    ("page", "prints"),
    [("README.md", ("plain ", "steered ", "(18, 576)\n")), ("docs/interventions.md", ())],
)
def test_the_programs_of_a_page_run_from_top_to_bottom(
    credentials: dict[str, str],
    environment: dict[str, str],
    tmp_path: Path,
    page: str,
    prints: tuple[str, ...],
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "credentials.json").write_text(json.dumps(credentials), encoding="utf-8")
    printed = run([sys.executable, "-c", "\n".join(programs(page))], tmp_path, environment)
    for text in prints:
        assert text in printed
