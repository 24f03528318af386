"""How long rows of the residual stream typically are: measured by workers, read by the API.

A norm belongs to weights and dtype, not to a process: the first worker that starts with them
stores it. It is what the strength of a steer is compared with.
"""

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from app.catalog.served import ServedModel
from app.kit.db import RETRIED, Conn, Database, DatabaseUnavailableError

REMEMBERED_SECONDS = 10.0
Weights: TypeAlias = tuple[str, str, str]  # name, revision, dtype


def store_norms(conn: Conn, model: ServedModel, norms: Sequence[float]) -> None:
    """Keep the typical norm of every layer at resid_post; a later measurement wins."""
    conn.execute(
        """
        INSERT INTO model_norms (model, revision, dtype, norms) VALUES (%s, %s, %s, %s::float8[])
        ON CONFLICT (model, revision, dtype) DO UPDATE
            SET norms = excluded.norms, measured_at = clock_timestamp()
        """,
        [*_weights(model), list(norms)],
    )


def has_norms(conn: Conn, model: ServedModel) -> bool:
    """Tell whether the norms of these weights were measured."""
    found = conn.execute(
        "SELECT 1 FROM model_norms WHERE model = %s AND revision = %s AND dtype = %s",
        list(_weights(model)),
    )
    return found.fetchone() is not None


def read_norms(conn: Conn) -> dict[Weights, tuple[float, ...]]:
    """Read all norms that were measured."""
    rows = conn.execute("SELECT model, revision, dtype, norms FROM model_norms")
    return {(row["model"], row["revision"], row["dtype"]): tuple(row["norms"]) for row in rows}


class TypicalNorms:
    """What was measured, read from Postgres again every few seconds."""

    def __init__(self, database: Database) -> None:
        """Read on first use."""
        self._database = database
        self._known: Mapping[Weights, tuple[float, ...]] = MappingProxyType({})
        self._read_at: float | None = None
        self._lock = threading.Lock()

    def of(self, model: ServedModel) -> tuple[float, ...] | None:
        """Give the typical norm at resid_post of every layer; None while it is not known."""
        # Nobody waits for a second reading: while Postgres is away, it takes seconds.
        if self._is_old() and self._lock.acquire(blocking=self._read_at is None):
            try:
                if self._is_old():
                    self._read()
            finally:
                self._lock.release()
        return self._known.get(_weights(model))

    def _is_old(self) -> bool:
        read_at = self._read_at
        return read_at is None or time.monotonic() - read_at > REMEMBERED_SECONDS

    def _read(self) -> None:
        """Read once; what cannot be read stays as it was."""
        try:
            with contextlib.suppress(*RETRIED, DatabaseUnavailableError):
                self._known = self._database.run(read_norms, attempts=1)
        finally:
            self._read_at = time.monotonic()


def _weights(model: ServedModel) -> Weights:
    return model.name, model.revision, model.dtype
