from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.catalog.conftest import bare_model
from tests.stack.running import RunningStack
from tests.stack.waiting import wait_for


def make_data_dir(folder: Path) -> Path:
    """Make a data folder that serves one bare model."""
    bare_model(folder / "models" / "bare")
    (folder / "models.toml").write_text('[models.bare]\npath = "models/bare"\n')
    return folder


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data folder that serves one bare model."""
    return make_data_dir(tmp_path / "data")


@pytest.fixture(scope="module")
def long_running_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """One stack for every test that leaves it as ready as it was."""
    stack = RunningStack(make_data_dir(tmp_path_factory.mktemp("long") / "data"))
    stack.wait_ready()
    yield stack
    stack.kill()
    wait_for(lambda: not stack.processes(), "the guardian to end everything")


@pytest.fixture
def start_stack(data_dir: Path) -> Iterator[Callable[..., RunningStack]]:
    """Start stacks in the data folder; each is ended after the test."""
    started: list[RunningStack] = []

    def start(*options: str, folder: Path = data_dir, **rest: Any) -> RunningStack:
        started.append(RunningStack(folder, *options, **rest))
        return started[-1]

    yield start
    for stack in started:
        stack.kill()
    for stack in started:
        wait_for(lambda stack=stack: not stack.processes(), "the guardian to end everything")
