"""The repository as the rules see it: files, syntax trees, what imports what."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("app", "worker", "tiller", "migrations")
CHECKED = (*PACKAGES, "tests", "bench", "examples")


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Path below the root, as the messages show it."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Dotted name."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources(*packages: str) -> tuple[Source, ...]:
    """Every Python file of the packages, tests included when asked for."""
    return tuple(
        Source(path, text := path.read_text(encoding="utf-8"), ast.parse(text, str(path)))
        for package in packages or CHECKED
        for path in sorted((ROOT / package).rglob("*.py"))
    )


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every file that git has or would take (new files count, ignored ones do not)."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return tuple(sorted({path for path in paths if path.is_file()}))


def imports(source: Source) -> Iterator[tuple[str, int]]:
    """Every imported module of a file, with its line; also those inside functions."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
            # `from app.jobs import claims` imports app.jobs.claims as well.
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
