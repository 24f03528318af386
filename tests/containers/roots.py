"""Builds the images' stages in folders, without Docker: for machines that have root alone.

    python -m tests.containers.roots worker-cpu --base /path/to/debian --out /path/for/stages

`--base` is a clean Debian root (debootstrap --variant=minbase bookworm). Each stage becomes an
overlay on its parent's; every RUN of the Dockerfile is run there by chroot, every COPY copies.
How packages are reached is this machine's matter: `--show PATH` makes a file or folder of it
visible while commands run (certificates, a local package index), PIP_* variables pass through.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.containers.dockerfile import Stage, Step, lineage, read_stages
from tests.rules.source_tree import ROOT

DEVICES = ("null", "zero", "random", "urandom", "shm")


class Builder:
    """Builds stages below one folder; with `keep`, only those that are not there yet."""

    def __init__(self, base: Path, out: Path, shown: Sequence[Path], *, keep: bool) -> None:
        """Remember where things are."""
        self._base, self._out, self._shown, self._keep = base, out, shown, keep
        self.stages = read_stages(ROOT / "Dockerfile")
        self._done: set[str] = set()

    def build(self, name: str) -> None:
        """Build a stage after everything that it is made from; one that was kept is not built."""
        if name in self._done or (self._keep and (self._out / name / "whole").exists()):
            return
        stage = self.stages[name]
        for other in self._sources(stage):
            self.build(other)
        self._done.add(name)
        shutil.rmtree(self._out / name, ignore_errors=True)
        (self._out / name / "layer").mkdir(parents=True)
        started = time.monotonic()
        with self.mounted(name) as root:
            for step in stage.steps:
                self._take(step, stage, root)
        (self._out / name / "whole").touch()
        seconds, size = time.monotonic() - started, _megabytes(self._out / name / "layer")
        print(f"{name:<18} {seconds:7.1f} s {size:8.1f} MB", flush=True)  # noqa: T201

    @contextlib.contextmanager
    def mounted(self, name: str) -> Iterator[Path]:
        """Make the file system of a stage visible, with devices and what `shown` names."""
        folder = self._out / name
        root, scratch = folder / "root", folder / "work"
        for made in (root, scratch):
            made.mkdir(exist_ok=True)
        below = [self._out / stage.name / "layer" for stage in lineage(self.stages, name)[:-1]]
        lower = ":".join(map(str, [*reversed(below), self._base]))
        options = f"lowerdir={lower},upperdir={folder / 'layer'},workdir={scratch}"
        with contextlib.ExitStack() as stack:
            _mount(stack, "-t", "overlay", "tiller", "-o", options, root)
            _mount(stack, "-t", "proc", "proc", root / "proc")
            _mount(stack, "--bind", "/sys", root / "sys")
            _mount(stack, "-t", "tmpfs", "tmpfs", root / "dev")
            _mount(stack, "-t", "tmpfs", "tmpfs", root / "tmp")
            for device in DEVICES:
                self._show(stack, Path("/dev", device), root)
            for path in self._shown:
                self._show(stack, path, root)
            yield root

    def environment(self, name: str) -> dict[str, str]:
        """Collect the ENV of a stage and of those below it."""
        found: dict[str, str] = {}
        for stage in lineage(self.stages, name):
            for step in stage.steps:
                if step.word == "ENV":
                    found |= step.assignments()
        return found

    def _sources(self, stage: Stage) -> list[str]:
        copied = [
            step.rest.split()[0].removeprefix("--from=")
            for step in stage.steps
            if step.word == "COPY" and step.rest.startswith("--from=")
        ]
        return [name for name in (stage.parent, *copied) if name in self.stages]

    def _take(self, step: Step, stage: Stage, root: Path) -> None:
        if step.word == "WORKDIR":
            (root / step.rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif step.word == "COPY":
            self._copy(step.rest.split(), root)
        elif step.word == "RUN":
            print(f"  RUN {step.rest[:110]}", flush=True)  # noqa: T201
            passed = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
            subprocess.run(
                ["chroot", str(root), "/bin/sh", "-c", step.rest],
                env={**passed, "DEBIAN_FRONTEND": "noninteractive", **self.environment(stage.name)},
                stdout=subprocess.DEVNULL,
                check=True,
            )

    def _copy(self, words: list[str], root: Path) -> None:
        with contextlib.ExitStack() as stack:
            if words[0].startswith("--from="):
                other = stack.enter_context(self.mounted(words[0].removeprefix("--from=")))
                sources, ignored = [other / words[1].lstrip("/")], None
            else:
                sources = sorted(found for word in words[:-1] for found in ROOT.glob(word))
                ignored = shutil.ignore_patterns("__pycache__")
            for source in sources:
                goal = root / words[-1].lstrip("/")
                goal = goal / source.name if words[-1].endswith("/") else goal
                goal.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, goal, symlinks=True, ignore=ignored, dirs_exist_ok=True)
                else:
                    shutil.copy2(source, goal)

    def _show(self, stack: contextlib.ExitStack, path: Path, root: Path) -> None:
        target = root / str(path).lstrip("/")
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        _mount(stack, "--bind", path, target)


def _mount(stack: contextlib.ExitStack, *words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)
    stack.callback(subprocess.run, ["umount", "--lazy", str(words[-1])], check=True)


def _megabytes(folder: Path) -> float:
    said = subprocess.run(["du", "-sk", folder], check=True, capture_output=True, text=True)
    return int(said.stdout.split()[0]) / 1024


def main() -> int:
    """Build the stages that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", nargs="+")
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", action="store_true", help="build only what is not there yet")
    parser.add_argument("--show", type=Path, action="append", default=[])
    options = parser.parse_args()
    builder = Builder(
        options.base.resolve(), options.out.resolve(), options.show, keep=options.keep
    )
    for name in options.stage:
        builder.build(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
