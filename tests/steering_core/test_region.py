"""The engine's side of a region keeps no file open that it cannot use."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from worker.steering.region import CaptureRegion, RegionShape, RegionWriter

SHAPE = RegionShape(layers=2, rows=5, width=8, dtype="float32")


def open_files(path: Path) -> int:
    """Count this process's descriptors of a file, deleted or not."""
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link).startswith(str(path)) for link in links)


def test_a_region_that_cannot_be_mapped_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "region"
    CaptureRegion.create(path, SHAPE)
    before = open_files(path)

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOMEM, "cannot allocate memory")

    monkeypatch.setattr(np, "memmap", full)
    with pytest.raises(OSError, match="cannot allocate"):
        RegionWriter(path, SHAPE)
    assert open_files(path) == before


def test_a_region_deleted_while_it_is_open_still_takes_rows(tmp_path: Path) -> None:
    path = tmp_path / "region"
    CaptureRegion.create(path, SHAPE)
    writer = RegionWriter(path, SHAPE)
    path.unlink()
    writer.put(np.ones((2, 2, 8), dtype=np.float32), 3)
    assert open_files(path) >= 1
    writer.close()
