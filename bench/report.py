"""Where a benchmark's figures go: flat JSON in results/, and its section of RESULTS.md."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
TABLE = FOLDER / "RESULTS.md"


def machine(*packages: str) -> str:
    """Name date, machine and versions, as every section begins."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    cores = f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{datetime.now(UTC):%Y-%m-%d}; {cores}; Python {platform.python_version()}, {versions}."


def save(name: str, title: str, figures: Mapping[str, float], lines: Sequence[str]) -> None:
    """Write results/`name`.json and replace the section of `name` in RESULTS.md."""
    path = FOLDER / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    text = "\n".join([begin, f"## {title}", "", *lines, end, ""])
    old = TABLE.read_text(encoding="utf-8") if TABLE.exists() else "# Benchmark results\n"
    if begin in old:
        before, rest = old.split(begin, 1)
        text = before + text + rest.split(end, 1)[1].lstrip("\n")
    else:
        text = old.rstrip("\n") + "\n\n" + text
    TABLE.write_text(text, encoding="utf-8")
