"""The file of one capture at one layer: rows in, full row groups out, moments beside.

What a row is (a position's vector, norm or projections, a request's mean) is in its columns; here
every row is `width` numbers. Rows stay where the engine left them (memory-mapped files) until
there are enough of them for a row group; then they are widened to float32 in one buffer, written,
and counted. pyarrow keeps about 8 MB for a file between two row groups, so a part of many layers
writes most of its files only when it closes, one after the other (`deferred`): neither memory nor
the number of open files follows the layers.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from app.results.moments import RunningMoments
from app.results.parquet_file import ParquetFile, WrittenFile
from app.results.schema import activations_options, activations_schema, row_group_rows
from app.steering.spec import Reduce

RawRows = npt.NDArray[np.uint16] | npt.NDArray[np.float32]
Columns = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """What a capture of one request read at one layer.

    `values` is [rows, width], bfloat16 as uint16 bit patterns or float32. `columns` has an array
    [rows] for each column between custom_id and the value; `counted` [rows] says which rows go
    into the running statistics. `written` is called once, when the arrays are needed no more.
    """

    request_index: int
    custom_id: str | None
    columns: Columns
    counted: npt.NDArray[np.bool_]
    values: RawRows
    written: Callable[[], None]


def position_columns(
    positions: npt.NDArray[np.int32],
    *,
    prompt_tokens: int,
    token_ids: npt.NDArray[np.int32],
    steered: npt.NDArray[np.bool_],
) -> Columns:
    """Give the columns of rows that belong to a position each; `token_ids` are all that ran."""
    return {
        "position": positions,
        "token_id": token_ids[positions],
        "is_generated": positions >= prompt_tokens,
        "steered": steered,
    }


def mean_columns(positions: npt.NDArray[np.int32], *, rows: int) -> Columns:
    """Give the columns of a mean over `positions`: one row, or none."""
    return {"positions": np.full(rows, len(positions), dtype=np.int32)}


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
        reduce: Reduce,
        width: int,
        footer: Mapping[str, str],
        buffer: WideningBuffer,
        deferred: bool = False,
    ) -> None:
        """Prepare the file; `width` is how many numbers each row's value has.

        `deferred`: nothing is written before `finish`.
        """
        self.width = width
        self.moments = RunningMoments(width)
        self._reduce = reduce
        self._schema = activations_schema(capture, width, reduce)
        self._open = partial(
            ParquetFile, path, self._schema, activations_options(capture, reduce), footer
        )
        self._file: ParquetFile | None = None  # opened when there is something to write
        self._buffer = buffer
        self._deferred = deferred
        self._group_rows = row_group_rows(width)
        self._waiting: deque[_Slice] = deque()
        self._waiting_rows = 0

    def add(self, request: CapturedRequest) -> None:
        """Take a request's rows in; writes as many full row groups as there are, or none yet."""
        if not len(request.values):
            request.written()
            return
        self._waiting.append(_Slice(request, 0, len(request.values)))
        self._waiting_rows += len(request.values)
        if not self._deferred:
            self._write_full_groups()

    def finish(self) -> WrittenFile:
        """Write what waits as the last row group, close the file and fsync it."""
        self._write_full_groups()
        if self._waiting:
            self._write_group(self._waiting_rows)
        return self._opened().finish()

    def abandon(self) -> None:
        """Close and delete the file, and let every waiting request go."""
        if self._file is not None:
            self._file.abandon()
        while self._waiting:
            self._waiting.popleft().source.written()

    def _opened(self) -> ParquetFile:
        self._file = self._file or self._open()
        return self._file

    def _write_full_groups(self) -> None:
        while self._waiting_rows >= self._group_rows:
            self._write_group(self._group_rows)

    def _write_group(self, rows: int) -> None:
        slices = self._take(rows)
        values = self._widen(slices, rows)
        counted = np.concatenate([item.source.counted[item.start : item.end] for item in slices])
        self._opened().write(self._table(slices, values))
        self.moments.add(values, counted)
        for item in slices:
            if item.end == len(item.source.values):
                item.source.written()

    def _take(self, rows: int) -> list[_Slice]:
        """Take slices of exactly `rows` rows off the queue; the last request may be cut in two."""
        taken: list[_Slice] = []
        self._waiting_rows -= rows
        while rows > 0:
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

    def _table(self, slices: list[_Slice], values: npt.NDArray[np.float32]) -> pa.Table:
        counts = [item.rows for item in slices]
        sources = [item.source for item in slices]
        which = pa.array(np.repeat(np.arange(len(sources), dtype=np.int32), counts))
        names = pa.array([source.custom_id for source in sources], type=pa.string())
        numbers = pa.Array.from_buffers(
            pa.float32(), values.size, [None, pa.py_buffer(values.reshape(-1))]
        )
        if self._reduce is not Reduce.norm:
            numbers = pa.FixedSizeListArray.from_arrays(numbers, type=self._schema.field(-1).type)
        columns = [
            pa.array(np.repeat([source.request_index for source in sources], counts)),
            names.take(which),
            *(_joined(slices, name) for name in self._schema.names[2:-1]),
            numbers,
        ]
        return pa.Table.from_arrays(columns, schema=self._schema)


def _joined(slices: list[_Slice], column: str) -> pa.Array:
    return pa.array(
        np.concatenate([item.source.columns[column][item.start : item.end] for item in slices])
    )
