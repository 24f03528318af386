"""Reads captured rows of finished requests back out of their parts: `from` of a replace.

    references -> the requests and what they captured (Postgres) -> files -> rows, as vectors

Jobs are looked up all at once; of those that the account has, one after the other. References to
one file are read together: its footer once, then only those row groups that hold a wanted row, one
at a time. Memory is the rows that were asked for, which are capped, and one row group. A reference
that cannot be served gets a sentence that says why.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from app.completions.rows_of import RowsOf
from app.errors import InvalidRequestError
from app.jobs.states import RequestState
from app.kit.db import Conn, Database
from app.kit.ids import public_id
from app.results.schema import RESIDUAL_STREAM
from app.results.stored_file import StoredFile
from app.settings import Limits
from app.steering.spec import Capture, Reduce, capture_from_json
from app.steering.vectors import Vector
from app.storage import ObjectStore, job_key

NAMED_MAX: Final = 12  # layers or positions that a reason lists
_COMPLETION: Final = "named_bytes_completion"
_NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class CapturedLimits:
    """How much may be read at once, and for whom: the words of the errors depend on it."""

    bytes_max: int
    jobs_max: int
    is_job: bool

    @classmethod
    def of_job(cls, limits: Limits) -> "CapturedLimits":
        """Give the limits of a Job."""
        return cls(limits.captured_bytes, limits.captured_jobs, is_job=True)

    @classmethod
    def of_completion(cls, limits: Limits) -> "CapturedLimits":
        """Give the limits of a Completion."""
        return cls(limits.named_bytes_completion, limits.interventions_per_request, is_job=False)

    def too_many_bytes(self) -> InvalidRequestError:
        """Make the error for more rows than may be read."""
        what, name = ("Job", "captured_bytes") if self.is_job else ("Completion", _COMPLETION)
        msg = (
            f"The rows that this {what} copies by from take more than the {self.bytes_max} bytes "
            f"that {name} allows (GET /v1/limits). Copy fewer positions"
            + (", or split the Job." if self.is_job else ".")
        )
        param = "requests" if self.is_job else "interventions"
        return InvalidRequestError(msg, param=param, code="captured_rows_too_large")

    def too_many_jobs(self, found: int) -> InvalidRequestError:
        """Make the error for references to more Jobs than may be looked into."""
        msg = (
            f"Rows of {found} Jobs are copied by from; at most {self.jobs_max} may be named "
            "(captured_jobs in GET /v1/limits). Copy from fewer Jobs, or split the Job."
        )
        return InvalidRequestError(msg, param="requests", code="too_many_captured_jobs")


@dataclass(frozen=True, slots=True)
class _Source:
    """A request of an earlier Job: whether it succeeded, what it captured, how far it ran."""

    request_index: int
    state: RequestState
    rows: int
    captures: tuple[Capture, ...]


@dataclass(frozen=True, slots=True)
class _File:
    """A file of one capture at one layer. Files of one lease token cover the same requests."""

    job_id: UUID
    path: str
    bytes: int


@dataclass(slots=True)
class _Wanted:
    """Rows that are being copied: `values` is [positions, width] once a file was opened."""

    ref: RowsOf
    request_index: int
    positions: npt.NDArray[np.int64]
    copied: npt.NDArray[np.bool_]
    values: npt.NDArray[np.float32] | None = None


class CapturedRows:
    """Reads captured rows for intake; safe to share between threads."""

    def __init__(self, database: Database, store: ObjectStore, limits: CapturedLimits) -> None:
        """Read from this database and store, within `limits` at once."""
        self._database = database
        self._store = store
        self._limits = limits

    def read(self, account_id: UUID, wanted: Collection[RowsOf]) -> dict[RowsOf, Vector | str]:
        """Give each reference its rows, float32 [positions, width], or why there are none.

        A reason is a sentence without its end, as "request 3 of job_… has not finished". Raises
        InvalidRequestError (code `captured_rows_too_large` or `too_many_captured_jobs`) when all
        of them are too much.
        """
        answers: dict[RowsOf, Vector | str] = {}
        by_job: dict[UUID, list[RowsOf]] = defaultdict(list)
        for ref in wanted:
            by_job[ref.job_id].append(ref)
        own = self._database.run(partial(_own_jobs, account_id=account_id, job_ids=list(by_job)))
        if len(own) > self._limits.jobs_max:
            raise self._limits.too_many_jobs(len(own))
        for job_id in by_job.keys() - own:
            reason = f"this account has no Job {public_id('job', job_id)}"
            answers.update(dict.fromkeys(by_job.pop(job_id), reason))
        files: dict[_File, list[_Wanted]] = defaultdict(list)
        for job_id, refs in by_job.items():
            found = self._database.run(partial(_find, job_id=job_id, refs=refs))
            for ref, place in found.items():
                if isinstance(place, str):
                    answers[ref] = place
                else:
                    file, index = place
                    positions = np.asarray(ref.positions, dtype=np.int64)
                    copied = np.zeros(len(positions), dtype=np.bool_)
                    files[file].append(_Wanted(ref, index, positions, copied))
        room = self._limits.bytes_max
        for file, items in files.items():
            room -= self._copy(file, items, room)
            for item in items:
                answers[item.ref] = _vector(item)
        return answers

    def _copy(self, file: _File, items: list[_Wanted], room: int) -> int:
        size = _copy_rows(self._store, file, items, room)
        if size > room:
            raise self._limits.too_many_bytes()
        return size


def _own_jobs(conn: Conn, *, account_id: UUID, job_ids: list[UUID]) -> set[UUID]:
    """Say which of these Jobs the account has."""
    if not job_ids:
        return set()
    rows = conn.execute(
        "SELECT id FROM jobs WHERE account_id = %s AND id = ANY(%s)", (account_id, job_ids)
    )
    return {row["id"] for row in rows}


def _find(conn: Conn, *, job_id: UUID, refs: list[RowsOf]) -> dict[RowsOf, tuple[_File, int] | str]:
    """Find for references to one Job the file and request_index, or why there is none."""
    sources = _sources(conn, job_id, refs)
    chosen: dict[RowsOf, tuple[int, str]] = {}
    found: dict[RowsOf, tuple[_File, int] | str] = {}
    for ref in refs:
        source = sources.get(ref.request)
        capture = _choose(ref, source)
        if source is not None and isinstance(capture, Capture):
            chosen[ref] = (source.request_index, capture.name)
        else:
            found[ref] = f"{_request(ref)} {capture}"
    places = _files(conn, job_id, chosen)
    for ref, (index, _) in chosen.items():
        place = places.get(ref)
        missing = f"{_request(ref)} has no published file of these rows"
        found[ref] = missing if place is None else (place, index)
    return found


def _sources(conn: Conn, job_id: UUID, refs: Iterable[RowsOf]) -> dict[int | str, _Source]:
    """Read the requests that are named, by index or by custom_id."""
    indices = {ref.request_index for ref in refs if ref.request_index is not None}
    names = {ref.custom_id for ref in refs if ref.custom_id is not None}
    sources: dict[int | str, _Source] = {}
    for row in conn.execute(
        """
        SELECT request_index, custom_id, state, prompt_tokens, completion_tokens,
            spec -> 'captures' AS captures
        FROM requests WHERE job_id = %(job)s AND request_index = ANY(%(indices)s)
        UNION ALL
        SELECT request_index, custom_id, state, prompt_tokens, completion_tokens,
            spec -> 'captures' AS captures
        FROM requests WHERE job_id = %(job)s AND custom_id = ANY(%(names)s)
        """,
        {"job": job_id, "indices": sorted(indices), "names": sorted(names)},
    ):
        source = _Source(
            row["request_index"],
            RequestState(row["state"]),
            row["prompt_tokens"] + (row["completion_tokens"] or 0) - 1,
            tuple(map(capture_from_json, row["captures"] or ())),
        )
        if row["request_index"] in indices:
            sources[row["request_index"]] = source
        if row["custom_id"] in names:
            sources[row["custom_id"]] = source
    return sources


def _choose(ref: RowsOf, source: _Source | None) -> Capture | str:
    """Choose the capture that has the rows: one read after all ops before one read before them."""
    if source is None:
        return "does not exist"
    if source.state is RequestState.pending:
        return "has not finished; wait for it"
    if source.state is not RequestState.succeeded:
        return f"is {source.state.value} and captured nothing"
    whole = [item for item in source.captures if item.reduce is Reduce.none]
    at_site = [item for item in whole if item.site is ref.site]
    if not at_site:
        read = sorted({item.site.value for item in whole})
        return f"captured no rows of {ref.site.value}; {_has('it captured', read)}"
    at_layer = [item for item in at_site if ref.layer in item.layers]
    if not at_layer:
        layers = sorted({layer for item in at_site for layer in item.layers})
        return (
            f"captured {ref.site.value} not at layer {ref.layer}; {_has('it has layers', layers)}"
        )
    beyond = [position for position in ref.positions if position >= source.rows]
    if beyond:
        return (
            f"ran positions 0 to {source.rows - 1} and so has no row at {_listed(beyond)} (the "
            "last generated token never runs)"
        )
    whole = [item for item in at_layer if all(map(item.reads, ref.positions))]
    if not whole:
        most = min(at_layer, key=lambda item: sum(not item.reads(p) for p in ref.positions))
        missing = [position for position in ref.positions if not most.reads(position)]
        return f"captured {ref.site.value} at layer {ref.layer} without {_listed(missing)}"
    return min(whole, key=lambda item: item.before)


def _files(
    conn: Conn, job_id: UUID, chosen: Mapping[RowsOf, tuple[int, str]]
) -> dict[RowsOf, _File]:
    """Find the file of each: its request lies in a live part, its capture in a file of that."""
    if not chosen:
        return {}
    indices = [index for index, _ in chosen.values()]
    parts = conn.execute(
        """
        SELECT lease_token, first_index, end_index FROM parts
        WHERE job_id = %s AND superseded_at IS NULL AND first_index <= %s AND end_index > %s
        ORDER BY first_index
        """,
        (job_id, max(indices), min(indices)),
    ).fetchall()
    firsts = [part["first_index"] for part in parts]
    tokens: dict[RowsOf, int] = {}
    for ref, (index, _) in chosen.items():
        place = bisect_right(firsts, index) - 1
        if place >= 0 and index < parts[place]["end_index"]:
            tokens[ref] = parts[place]["lease_token"]
    rows = conn.execute(
        """
        SELECT lease_token, layer, COALESCE(capture, %(stream)s) AS capture, path, bytes
        FROM result_files
        WHERE lease_token = ANY(%(tokens)s) AND layer = ANY(%(layers)s)
            AND COALESCE(capture, %(stream)s) = ANY(%(captures)s)
            AND kind IN ('activations', 'captures')
        """,
        {
            "stream": RESIDUAL_STREAM,
            "tokens": sorted(set(tokens.values())),
            "layers": sorted({ref.layer for ref in chosen}),
            "captures": sorted({capture for _, capture in chosen.values()}),
        },
    )
    files = {
        (row["lease_token"], row["layer"], row["capture"]): _File(job_id, row["path"], row["bytes"])
        for row in rows
    }
    places = {ref: (token, ref.layer, chosen[ref][1]) for ref, token in tokens.items()}
    return {ref: files[place] for ref, place in places.items() if place in files}


def _copy_rows(store: ObjectStore, file: _File, items: list[_Wanted], bytes_max: int) -> int:
    """Copy what is wanted of one file into `items`, unless it is more than `bytes_max` bytes.

    Gives how many bytes it is.
    """
    source = StoredFile(store, job_key(file.job_id, file.path), file.bytes)
    with pq.ParquetFile(pa.PythonFile(source, mode="r"), pre_buffer=True) as parquet:
        kind = parquet.schema_arrow.field(-1).type
        value = parquet.schema_arrow.names[-1]
        size: int = _NUMBER_BYTES * kind.list_size * sum(len(item.positions) for item in items)
        if size > bytes_max:
            return size
        for item in items:
            item.values = np.empty((len(item.positions), kind.list_size), dtype=np.float32)
        for group in range(parquet.num_row_groups):
            inside = _inside(parquet.metadata.row_group(group), items)
            if inside:
                table = parquet.read_row_group(
                    group, columns=["request_index", "position", value], use_threads=False
                )
                _copy_group(table, inside)
    return size


def _inside(group: pq.RowGroupMetaData, items: list[_Wanted]) -> list[_Wanted]:
    """Choose the items that may have rows in a row group, by its statistics."""
    index_range = _range(group, "request_index")
    if index_range is None:
        return items
    first, last = index_range
    inside = [item for item in items if first <= item.request_index <= last]
    position_range = _range(group, "position") if first == last else None
    if position_range is None:
        return inside
    low, high = position_range  # one request's own: a long prompt fills many groups
    return [item for item in inside if ((low <= item.positions) & (item.positions <= high)).any()]


def _range(group: pq.RowGroupMetaData, name: str) -> tuple[int, int] | None:
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema == name:
            facts = column.statistics
            return (facts.min, facts.max) if facts is not None and facts.has_min_max else None
    return None


def _copy_group(table: pa.Table, items: list[_Wanted]) -> None:
    """Copy rows of a row group, which is ordered by request_index, then position."""
    index = table.column(0).to_numpy()
    position = table.column(1).to_numpy()
    column = table.column(2).combine_chunks()
    values = column.flatten().to_numpy().reshape(len(index), column.type.list_size)
    for item in items:
        start, end = np.searchsorted(index, (item.request_index, item.request_index + 1))
        if start == end:
            continue
        rows = start + np.searchsorted(position[start:end], item.positions)
        there = rows < end
        there[there] = position[rows[there]] == item.positions[there]
        assert item.values is not None
        item.values[there] = values[rows[there]]
        item.copied |= there


def _vector(item: _Wanted) -> Vector | str:
    missing = item.positions[~item.copied].tolist()
    if missing or item.values is None:
        return f"{_request(item.ref)} has no row at {_listed(missing)} in its file"
    if not np.isfinite(item.values).all():
        return f"{_request(item.ref)} captured a number that is not finite"
    values, item.values = item.values, None
    return Vector("float32", values.shape, values.astype("<f4", copy=False).tobytes())


def _request(ref: RowsOf) -> str:
    name = f"custom_id {ref.custom_id!r}" if ref.request_index is None else str(ref.request_index)
    return f"request {name} of {public_id('job', ref.job_id)}"


def _has(what: str, things: list[Any]) -> str:
    return f"{what} {_some(things)}" if things else "it captured no rows at all"


def _listed(positions: list[int]) -> str:
    return f"position{'s' if len(positions) > 1 else ''} {_some(positions)}"


def _some(things: list[Any]) -> str:
    more = ", …" if len(things) > NAMED_MAX else ""
    return ", ".join(map(str, things[:NAMED_MAX])) + more
