"""The captures of a part: checked when an outcome comes in, written when its turn has come.

    refuse (any thread) -> shelve (any thread) -> write (in order of request_index) -> files

A capture that does not fit (rows that do not add up, another shape than its file has) is told to
its own request before anything is written; files are never left half right. Rows stay in mapped
files until they are in Parquet, so memory does not grow with the shard.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from mmap import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from app.jobs.capture_shapes import CaptureShape
from app.results.activations_file import (
    ActivationsFile,
    CapturedRequest,
    RawRows,
    WideningBuffer,
    mean_columns,
    position_columns,
)
from app.results.moments import RunningMoments
from app.results.parquet_file import WrittenFile
from app.results.rows import acting_interventions, steered_positions
from app.steering.spec import Capture, Reduce
from worker.outcomes import CaptureRows, Errored, Succeeded, Work

STREAMED_FILES_MAX = 4  # files written while the shard runs, x 8 MB x shards in flight
KEPT_BYTES_MAX = 64 * 1024  # of a request's rows without a file that stay in memory

_DTYPES = {"bfloat16": np.uint16, "float32": np.float32}


@dataclass(frozen=True, slots=True)
class FileShape:
    """What one file holds: of which shape, in which dtype it was, how wide its rows are."""

    shape: CaptureShape
    dtype: str
    width: int


@dataclass(frozen=True, slots=True)
class FinishedCapture:
    """A closed file of one capture at one layer."""

    capture: str
    layer: int
    holds: FileShape
    written: WrittenFile


class PartCaptures:
    """Files of activations and captures of one part, below `folder`, `meta` in every footer."""

    def __init__(self, folder: Path, meta: Mapping[str, str]) -> None:
        """Start without files."""
        self._folder = folder
        self._meta = meta
        self._shapes: dict[str, FileShape] = {}
        self._shapes_lock = threading.Lock()
        self._files: dict[tuple[str, int], ActivationsFile] = {}
        self._buffer = WideningBuffer()

    def __bool__(self) -> bool:
        """Whether there is any file."""
        return bool(self._files)

    @property
    def moments(self) -> dict[tuple[str, int], RunningMoments]:
        """Moments of every file, by capture and layer."""
        return {key: file.moments for key, file in self._files.items()}

    def refuse(self, work: Work, outcome: Succeeded) -> Errored | None:
        """Say what is wrong with the captures of an outcome; None when they can be written.

        The first capture of a name decides what the files of that name hold.
        """
        asked = {capture.name: capture for capture in work.spec.captures}
        came = {rows.name: rows for rows in outcome.captures}
        ran = work.spec.prompt_tokens + len(outcome.choices[0].token_ids) - 1
        shapes: dict[str, FileShape] = {}
        for name in {**asked, **came}:
            wrong = misfit(asked.get(name), came.get(name), ran)
            if wrong is not None:
                return Errored("activation_rows_mismatch", f"The capture {name!r} {wrong}.")
            rows = came[name]
            width = next(iter(rows.layers.values())).shape[1]
            shapes[name] = FileShape(CaptureShape.of(asked[name]), rows.dtype, width)
        return self._refuse_conflict(shapes)

    def _refuse_conflict(self, shapes: Mapping[str, FileShape]) -> Errored | None:
        with self._shapes_lock:
            for name, holds in shapes.items():
                known = self._shapes.get(name, holds)
                if known != holds:
                    return Errored(
                        "capture_conflict",
                        f"The capture {name!r} reads {holds.shape}, {holds.width} numbers a row, "
                        f"but in other requests of this Job {known.shape}, {known.width} numbers "
                        "a row; use another name.",
                    )
            self._shapes.update(shapes)
        return None

    def shelve(self, work: Work, outcome: Succeeded) -> Succeeded:
        """Lay rows that are in memory, and not few, into mapped files until their turn has come.

        A file that an engine left beside rows in memory (those that a mean was taken of) goes.
        """
        loose = [rows for rows in outcome.captures if all(map(_in_memory, rows.layers.values()))]
        if not loose:
            return outcome
        for rows in loose:
            if rows.path is not None:
                rows.path.unlink(missing_ok=True)
        kept = [replace(rows, path=None) for rows in loose]
        size = sum(values.nbytes for rows in kept for values in rows.layers.values())
        if size > KEPT_BYTES_MAX:
            kept = _in_file(kept, self._folder / f"captured-{work.request_index}")
        shelved = {rows.name: rows for rows in kept}
        captures = tuple(shelved.get(rows.name, rows) for rows in outcome.captures)
        return replace(outcome, captures=captures)

    def write(self, work: Work, outcome: Succeeded, drop: Callable[[], None]) -> None:
        """Hand each file its rows; `drop` is called once, when the last of them is written."""
        token_ids = np.asarray(
            (*work.spec.prompt_token_ids, *outcome.choices[0].token_ids), dtype=np.int32
        )
        left = _Countdown(sum(len(rows.layers) for rows in outcome.captures), drop)
        asked = {capture.name: capture for capture in work.spec.captures}
        acting = acting_interventions(work.spec)
        for rows in outcome.captures:
            capture = asked[rows.name]
            for layer, values in sorted(rows.layers.items()):
                if rows.reduce is Reduce.mean:
                    columns = mean_columns(rows.positions, rows=len(values))
                    counted = np.ones(len(values), dtype=np.bool_)
                else:
                    # What is read before all ops is not steered here, whatever acts afterwards.
                    ops = () if capture.before else acting.get((capture.site, layer), ())
                    columns = position_columns(
                        rows.positions,
                        prompt_tokens=work.spec.prompt_tokens,
                        token_ids=token_ids,
                        steered=steered_positions(ops, rows.positions),
                    )
                    counted = rows.positions > 0
                self._file(rows.name, layer).add(
                    CapturedRequest(
                        request_index=work.request_index,
                        custom_id=work.custom_id,
                        columns=columns,
                        counted=counted,
                        values=values,
                        written=left.one_less,
                    )
                )

    def finish(self) -> Iterator[FinishedCapture]:
        """Close the files one after the other, by name and layer."""
        for (name, layer), file in sorted(self._files.items()):
            yield FinishedCapture(name, layer, self._shapes[name], file.finish())

    def abandon(self) -> None:
        """Close and delete all files, and let every waiting request go."""
        for file in self._files.values():
            file.abandon()

    def _file(self, name: str, layer: int) -> ActivationsFile:
        key = (name, layer)
        if key not in self._files:
            holds = self._shapes[name]
            self._files[key] = ActivationsFile(
                self._folder / "captures" / f"{name}-{layer}",
                capture=name,
                reduce=holds.shape.reduce,
                width=holds.width,
                footer={**self._meta, **_footer(name, layer, holds)},
                buffer=self._buffer,
                deferred=len(self._files) >= STREAMED_FILES_MAX,
            )
        return self._files[key]


def misfit(capture: Capture | None, rows: CaptureRows | None, ran: int) -> str | None:
    """Say how rows differ from what was asked and ran (`ran` positions); None when they do not."""
    if capture is None:
        return "was not asked for"
    if rows is None:
        return "was not read"
    if rows.reduce is not capture.reduce:
        return f"came as {rows.reduce.value}, not {capture.reduce.value}"
    if set(rows.layers) != set(capture.layers):
        return f"came with the layers {sorted(rows.layers)}, not {list(capture.layers)}"
    wanted = read_positions(capture, ran)
    if rows.positions.dtype != np.int32 or not np.array_equal(rows.positions, wanted):
        return f"has rows of {len(rows.positions)} positions, not of the {len(wanted)} that ran"
    count = min(len(wanted), 1) if rows.reduce is Reduce.mean else len(wanted)
    dtype = _DTYPES.get(rows.dtype) if rows.reduce is Reduce.none else np.float32
    projected = rows.reduce in (Reduce.norm, Reduce.project)
    width = capture.width(0) if projected else next(iter(rows.layers.values())).shape[-1]
    for layer, values in rows.layers.items():
        if values.shape != (count, width) or not width:
            return f"has {values.shape} numbers at Layer {layer}, not {(count, width)}"
        if dtype is None or values.dtype != dtype:
            return f"has rows of {values.dtype} at Layer {layer}, which cannot be {rows.dtype}"
    return None


def read_positions(capture: Capture, ran: int) -> npt.NDArray[np.int32]:
    """List the positions 0..ran - 1 that a capture reads."""
    if capture.spans is None:
        return np.arange(ran, dtype=np.int32)
    spans = [np.arange(a, min(b, ran), dtype=np.int32) for a, b in capture.spans]
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.int32)


def _footer(name: str, layer: int, holds: FileShape) -> dict[str, str]:
    shape = holds.shape
    footer = {
        "capture": name,
        "layer": str(layer),
        "site": shape.site.value,
        "when": shape.when,
        "reduce": shape.reduce.value,
        "source_dtype": holds.dtype,
        "storage_dtype": "float32",
        "width": str(holds.width),
    }
    if shape.reduce is Reduce.none:
        footer["exact"] = "every float32 here is exactly the value in source_dtype"
    if shape.reduce is Reduce.project:
        footer["unit"] = "true" if shape.unit else "false"
    return footer


def _in_memory(values: RawRows) -> bool:
    """Tell whether an array is no view of a mapped file."""
    owner: object = values
    while isinstance(owner, np.ndarray):
        if isinstance(owner, np.memmap):
            return False
        owner = owner.base
    return not isinstance(owner, mmap)


def _in_file(captures: Iterable[CaptureRows], path: Path) -> list[CaptureRows]:
    """Move rows from memory into one mapped file, bit for bit."""
    moved = []
    with path.open("wb") as file:
        for rows in captures:
            layers: dict[int, RawRows] = {}
            for layer, values in rows.layers.items():
                layers[layer] = values
                if values.size:  # nothing cannot be mapped
                    start = file.tell()
                    file.write(np.ascontiguousarray(values).data)
                    file.flush()
                    layers[layer] = np.memmap(path, values.dtype, "r", start, values.shape)
            moved.append(replace(rows, layers=layers, path=path))
    return moved


class _Countdown:
    """Calls `then` when it has been told `count` times that one is done."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count = count
        self._then = then
        if not count:
            then()

    def one_less(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._then()
