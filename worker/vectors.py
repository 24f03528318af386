"""Bring the Steering vectors of a request into the folder that the engine reads.

Numbers leave Postgres once per worker: a vector is a file under its content address, shared by
every request that names it. The folder is bounded; what running shards use is never removed.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from uuid import UUID

from app.completions.spec import RequestSpec
from app.kit.db import Database
from app.steering.spec import vector_names
from app.steering.vectors import read_vectors
from worker.engine.vectors import VectorCache


def vector_ids(specs: Iterable[RequestSpec]) -> set[str]:
    """Collect the ids of all vectors that these requests name."""
    names: set[str] = set()
    for spec in specs:
        names |= vector_names(spec.interventions, spec.captures)
    return names


class VectorShelf:
    """Fetches vectors by id and keeps those in use."""

    def __init__(
        self, database: Database, cache: VectorCache, folder: Path, bytes_max: int
    ) -> None:
        """Serve vectors out of `cache`, whose `folder` may grow to about `bytes_max` bytes."""
        self._database = database
        self._folder = folder
        self._cache = cache
        self._bytes_max = bytes_max
        self._in_use: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, account_id: UUID, ids: set[str]) -> None:
        """Make sure that every vector lies in the folder, and keep it until `give_back`.

        An id that the account does not have is left out: the engine then errors the requests
        that name it, and only those.
        """
        with self._lock:
            self._in_use.update(ids)
            missing = sorted(item for item in ids if not self._touch(item))
            for start in range(0, len(missing), 64):  # bounds the memory of one query
                self._fetch(account_id, missing[start : start + 64])

    def give_back(self, ids: set[str]) -> None:
        """Say that a shard no longer needs these vectors; trims the folder when it is too big."""
        with self._lock:
            self._in_use.subtract(ids)
            self._in_use += Counter()  # drops zeros
            self._trim()

    def _fetch(self, account_id: UUID, wanted: list[str]) -> None:
        found = self._database.run(lambda conn: read_vectors(conn, account_id, wanted))
        for vector_id, array in found.items():
            self._cache.put(vector_id, array)

    def _trim(self) -> None:
        files = [(path, path.stat()) for path in self._folder.glob("sv_*.npy")]
        total = sum(stat.st_size for _, stat in files)
        for path, stat in sorted(files, key=lambda item: item[1].st_mtime_ns):
            if total <= self._bytes_max:
                return
            if path.stem not in self._in_use:
                self._cache.remove(path.stem)
                total -= stat.st_size

    def _touch(self, vector_id: str) -> bool:
        """Note that a vector is used now, for the order of trimming; False when it is not here."""
        if not self._cache.has(vector_id):
            return False
        os.utime(self._cache.path(vector_id))
        return True
