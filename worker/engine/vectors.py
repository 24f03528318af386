"""Steering vectors as files that the engine process maps by id: numbers cross once, by page cache.

<folder>/<vector id>.npy   float32 [rows, width]
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


class VectorCache:
    """A folder of vectors. Files appear whole and never change: ids name contents."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, made if it does not exist."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._known: set[str] = set()

    def path(self, vector_id: str) -> Path:
        """Return where a vector's file is or would be; raise ValueError for a malformed id."""
        if not _ID.fullmatch(vector_id):
            msg = f"{vector_id!r} is not a vector id"
            raise ValueError(msg)
        return self._folder / f"{vector_id}.npy"

    def has(self, vector_id: str) -> bool:
        """Say whether the vector is here."""
        if vector_id in self._known:
            return True
        if not _ID.fullmatch(vector_id) or not self.path(vector_id).is_file():
            return False
        self._known.add(vector_id)
        return True

    def remove(self, vector_id: str) -> None:
        """Delete a vector that nothing uses; `put` may bring it back."""
        self._known.discard(vector_id)
        self.path(vector_id).unlink(missing_ok=True)

    def put(self, vector_id: str, array: npt.NDArray[np.generic]) -> None:
        """Store a vector [width] or [rows, width] as float32, unless it is here already."""
        if self.has(vector_id):
            return
        matrix = np.ascontiguousarray(np.atleast_2d(array), dtype=np.float32)
        target = self.path(vector_id)
        descriptor, name = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.save(file, matrix, allow_pickle=False)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._known.add(vector_id)
