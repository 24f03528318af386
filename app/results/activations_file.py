"""The file of one capture at one layer: vectors in, full row groups out, moments beside.

Vectors stay where the engine left them (memory-mapped files) until there are enough of them for
a row group; then they are widened to float32 in one buffer, written, and counted. pyarrow keeps
about 8 MB for a file between two row groups, so a part of many layers writes most of its files
only when it closes, one after the other (`deferred`): memory does not follow the layers either.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from app.results.moments import RunningMoments
from app.results.parquet_file import ParquetFile, WrittenFile
from app.results.schema import activations_options, activations_schema, row_group_rows

RawRows = npt.NDArray[np.uint16] | npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """The vectors of one request at one layer: row i is position i.

    `values` is [rows, width], bfloat16 as uint16 bit patterns or float32. `token_ids` and
    `steered` are [rows]. `written` is called once, when the vectors are needed no more.
    """

    request_index: int
    custom_id: str | None
    prompt_tokens: int
    token_ids: npt.NDArray[np.int32]
    steered: npt.NDArray[np.bool_]
    values: RawRows
    written: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Slice:
    source: CapturedRequest
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


class WideningBuffer:
    """Memory for one row group of float32, shared by the files of one part."""

    def __init__(self) -> None:
        """Start without memory."""
        self._words = np.empty(0, dtype=np.uint32)

    def take(self, rows: int, width: int) -> npt.NDArray[np.uint32]:
        """Give room for [rows, width]; what an earlier call gave is overwritten."""
        if self._words.size < rows * width:
            self._words = np.empty(rows * width, dtype=np.uint32)
        return self._words[: rows * width].reshape(rows, width)


class ActivationsFile:
    """One file of activations or captures under way. Requests come in order of their index."""

    def __init__(
        self,
        path: Path,
        *,
        capture: str,
        layer: int,
        width: int,
        footer: Mapping[str, str],
        buffer: WideningBuffer,
        deferred: bool = False,
    ) -> None:
        """Create the file; `width` is how many numbers each vector has.

        `deferred`: nothing is written before `finish`.
        """
        self.capture = capture
        self.layer = layer
        self.width = width
        self.moments = RunningMoments(width)
        self._schema = activations_schema(capture, width)
        self._file = ParquetFile(path, self._schema, activations_options(capture), footer)
        self._buffer = buffer
        self._deferred = deferred
        self._group_rows = row_group_rows(width)
        self._waiting: deque[_Slice] = deque()
        self._waiting_rows = 0

    def add(self, request: CapturedRequest) -> None:
        """Take a request's vectors in; writes as many full row groups as there are, or none yet."""
        self._waiting.append(_Slice(request, 0, len(request.values)))
        self._waiting_rows += len(request.values)
        if not self._deferred:
            self._write_full_groups()

    def finish(self) -> WrittenFile:
        """Write what waits as the last row group, close the file and fsync it."""
        self._write_full_groups()
        if self._waiting:
            self._write_group(self._waiting_rows)
        return self._file.finish()

    def abandon(self) -> None:
        """Close and delete the file, and let every waiting request go."""
        self._file.abandon()
        while self._waiting:
            self._waiting.popleft().source.written()

    def _write_full_groups(self) -> None:
        while self._waiting_rows >= self._group_rows:
            self._write_group(self._group_rows)

    def _write_group(self, rows: int) -> None:
        slices = self._take(rows)
        if rows:
            values = self._widen(slices, rows)
            position = np.concatenate(
                [np.arange(item.start, item.end, dtype=np.int32) for item in slices]
            )
            self._file.write(self._table(slices, position, values))
            self.moments.add(values, position > 0)
        for item in slices:
            if item.end == len(item.source.values):
                item.source.written()

    def _take(self, rows: int) -> list[_Slice]:
        """Take slices of exactly `rows` rows off the queue; the last request may be cut in two."""
        taken: list[_Slice] = []
        self._waiting_rows -= rows
        while self._waiting and (rows > 0 or self._waiting[0].rows == 0):
            item = self._waiting.popleft()
            if item.rows > rows:
                self._waiting.appendleft(_Slice(item.source, item.start + rows, item.end))
                item = _Slice(item.source, item.start, item.start + rows)
            taken.append(item)
            rows -= item.rows
        return taken

    def _widen(self, slices: list[_Slice], rows: int) -> npt.NDArray[np.float32]:
        """Copy the slices into one float32 array; bfloat16 is the upper half of float32."""
        words = self._buffer.take(rows, self.width)
        row = 0
        for item in slices:
            target = words[row : row + item.rows]
            values = item.source.values[item.start : item.end]
            if values.dtype == np.uint16:
                np.left_shift(values, 16, out=target, dtype=np.uint32, casting="unsafe")
            else:
                np.copyto(target.view(np.float32), values)
            row += item.rows
        return words.view(np.float32)

    def _table(
        self,
        slices: list[_Slice],
        position: npt.NDArray[np.int32],
        values: npt.NDArray[np.float32],
    ) -> pa.Table:
        counts = [item.rows for item in slices]
        sources = [item.source for item in slices]
        which = pa.array(np.repeat(np.arange(len(sources), dtype=np.int32), counts))
        names = pa.array([source.custom_id for source in sources], type=pa.string())
        numbers = pa.Array.from_buffers(
            pa.float32(), values.size, [None, pa.py_buffer(values.reshape(-1))]
        )
        prompt_tokens = np.repeat([source.prompt_tokens for source in sources], counts)
        columns = [
            pa.array(np.repeat([source.request_index for source in sources], counts)),
            names.take(which),
            pa.array(position),
            pa.array(_joined(slices, "token_ids")),
            pa.array(position >= prompt_tokens),
            pa.array(_joined(slices, "steered")),
            pa.FixedSizeListArray.from_arrays(numbers, type=self._schema.field(-1).type),
        ]
        return pa.Table.from_arrays(columns, schema=self._schema)


def _joined(slices: list[_Slice], column: str) -> npt.NDArray[np.generic]:
    return np.concatenate([getattr(item.source, column)[item.start : item.end] for item in slices])
