"""Parquet files as they are written: row group by row group, with their checksum, then fsynced.

`ParquetFile` holds at most one row group in memory, whatever the file grows to. The sha256 is
taken of the bytes as they go to disk, so nothing is read back.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A closed, fsynced file: how many rows and bytes it has, and their sha256."""

    path: Path
    rows: int
    bytes: int
    sha256: str


class _HashedSink:
    """A binary file, write only, that takes the sha256 of what goes through it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self.size = 0
        self.closed = False
        self.discarding = False

    def write(self, data: bytes) -> int:
        if self.discarding:
            return len(data)
        self._hash.update(data)
        self._file.write(data)
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._file.close()

    def sync(self) -> str:
        """Make the content durable; return its sha256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._hash.hexdigest()


class ParquetFile:
    """One Parquet file under way: `write` row groups, then `finish` once; `abandon` deletes it."""

    def __init__(
        self, path: Path, schema: pa.Schema, options: dict[str, Any], footer: Mapping[str, str]
    ) -> None:
        """Create the file, which must not exist; `footer` becomes its key-value metadata."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.rows = 0
        self._sink = _HashedSink(path)
        keyed = schema.with_metadata(dict(footer))
        self.schema: pa.Schema = keyed
        sink = pa.PythonFile(self._sink, mode="w")
        self._writer: pq.ParquetWriter | None = pq.ParquetWriter(sink, keyed, **options)

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Write the rows as one row group. An empty one is left out."""
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        if table.num_rows:
            table = table.replace_schema_metadata(self.schema.metadata)
            assert self._writer is not None, "the file is finished"
            self._writer.write_table(table, row_group_size=table.num_rows)
            self.rows += table.num_rows

    def finish(self) -> WrittenFile:
        """Write the footer, fsync, and say what was written. The local file stays."""
        assert self._writer is not None, "the file is finished"
        self._writer.close()
        self._writer = None  # a closed writer keeps megabytes of buffers
        digest = self._sink.sync()
        self._sink.close()
        return WrittenFile(self.path, self.rows, self._sink.size, digest)

    def abandon(self) -> None:
        """Close and delete the file; what the writer still holds goes nowhere."""
        self._sink.discarding = True
        if self._writer is not None:
            with suppress(pa.ArrowException, OSError):
                self._writer.close()
            self._writer = None
        self._sink.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        """Use as a context: a file that was not finished when it ends is deleted."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Delete the file after an error; a finished one stays."""
        if kind is not None:
            self.abandon()
