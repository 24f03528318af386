"""Writes docs/settings.md from the settings classes: python -m tests.rules.settings_page."""

from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from app.catalog.models_file import ModelEntry
from app.settings import Limits, Settings
from app.stack.settings import StackSettings
from tests.rules.source_tree import ROOT
from worker.models.settings import FetchSettings
from worker.settings import WorkerSettings

PAGE = ROOT / "docs" / "settings.md"

INTRODUCTION = """\
# Settings

Every setting is an environment variable, read once when a process starts. A process does not start
without those that are *required*; `tiller up` fills them in for its children, so on one machine
none has to be set. Where the default is empty, nothing is set, and the meaning says what that does.

This page is written from the code by `python -m tests.rules.settings_page`; a test compares the
two.
"""

SECTIONS: tuple[tuple[str, str, str, type[BaseModel]], ...] = (
    (
        "API and reconciler",
        "`python -m app serve` and `python -m app reconcile`.",
        "TILLER_",
        Settings,
    ),
    (
        "Limits",
        "Served by GET /v1/limits (lower case, no prefix); enforced before memory is spent.",
        "TILLER_LIMITS__",
        Limits,
    ),
    ("Worker", "`python -m worker`.", "TILLER_", WorkerSettings),
    (
        "One machine",
        "`tiller up`. Each of the first three replaces an embedded part with a server of yours.",
        "TILLER_",
        StackSettings,
    ),
    ("Fetching models", "`tiller models add`.", "TILLER_", FetchSettings),
)

MODELS = """\
## models.toml

One table for each model, `[models.NAME]`; paths are absolute or relative to the file. `tiller
models add` writes entries, a person may edit them; a change is seen at the next start.

"""


def render() -> str:
    """Write the whole page."""
    parts = [INTRODUCTION]
    for title, text, prefix, model in SECTIONS:
        rows = [
            f"| `{prefix}{name.upper()}` | {_default(field)} | {field.description} |"
            for name, field in model.model_fields.items()
            if name != "limits"
        ]
        parts.append(_section(f"## {title}\n\n{text}\n", "variable", rows))
    keys = [
        f"| `{name}` | {_default(field)} | {field.description} |"
        for name, field in ModelEntry.model_fields.items()
    ]
    parts.append(_section(MODELS.rstrip("\n") + "\n", "key", keys))
    return "\n".join(parts)


def _section(head: str, first: str, rows: list[str]) -> str:
    return "\n".join([head, f"| {first} | default | meaning |", "|---|---|---|", *rows, ""])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.default
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Path):
        return f"`{value}`"
    grouped = isinstance(value, int) and value >= 100_000
    return f"`{value:_}`" if grouped else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
