"""Outcomes of a shard's requests, turned into its part: files in the object store, checksummed.

    add (any order, any thread) -> rows wait for their turn -> files in the spool folder
                                -> close: fsync, sha256, put -> PublishedPart
    close, while the store is away -> StoreAwayError, and may be called again

An outcome is turned into rows as soon as it comes: one that no file can hold becomes an error of
its request alone. Rows are written in order of request_index while the shard still runs. Captured
rows stay in mapped files until then, waiting texts beyond WAITING_BYTES_MAX go to the spool, so
memory does not grow with the shard. Nothing here is visible to a user until finish_shard names the
part in its transaction; what was put and is never named is an orphan, deleted a day later. Only
`close` and `withdraw` speak to the store, which may hang; `abandon` never waits for it.
"""

import logging
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from app.jobs.records import FileKind, LeasedShard, PublishedFile, PublishedPart
from app.kit.ids import public_id
from app.results.moments import moments_table
from app.results.parquet_file import ParquetFile, WrittenFile
from app.results.paths import capture_path, moments_path, results_path
from app.results.rows import Row, RowFacts, RowName, rows_batch
from app.results.schema import (
    MOMENTS,
    RESIDUAL_STREAM,
    RESULTS,
    RESULTS_GROUP_BYTES,
    RESULTS_GROUP_ROWS,
    SCHEMA_VERSION,
    results_options,
    statistics_options,
)
from app.storage import ObjectStore, StoreError, job_key
from worker.engine.protocol import EngineFacts
from worker.outcome_rows import memory_bytes, writable_rows
from worker.outcomes import Outcome, Succeeded, Work
from worker.part_captures import FinishedCapture, PartCaptures

log = logging.getLogger(__name__)

SHORT_TEXT = 1000  # characters: a text that may wait twice, beside its row
WAITING_BYTES_MAX = 32 * 1024**2  # rows that wait in memory for an earlier request to finish


class PartClosedError(Exception):
    """The part was closed, abandoned or broken before; nothing can be added."""


class StoreAwayError(Exception):
    """The store did not take a file of a part; the part is whole, and `close` may try again."""


def job_meta(shard: LeasedShard, facts: EngineFacts) -> dict[str, str]:
    """Give what the footer of every file of a part says about Job, model and engine."""
    return {
        "schema_version": SCHEMA_VERSION,
        "job_id": public_id("job", shard.job_id),
        "lease_token": str(shard.lease_token),
        "model": facts.model,
        "revision": facts.revision,
        "engine": facts.engine,
        "engine_mode": facts.mode,
        "source_dtype": facts.dtype,
        "hidden_size": str(facts.hidden_size),
        "n_layers": str(facts.n_layers),
    }


@dataclass(slots=True)
class _Waiting:
    """A finished request whose turn has not come.

    `rows` are in the file `spilled` when memory is short. `captured` is the outcome, without its
    texts, of a request that captured something.
    """

    work: Work
    rows: list[Row]
    captured: Succeeded | None
    bytes: int
    spilled: Path | None = None

    def drop(self) -> None:
        if self.captured is not None:
            self.captured.release()
        if self.spilled is not None:
            self.spilled.unlink(missing_ok=True)


class PartWriter:
    """Writes one part. `add` is safe from several threads; `cut`, `close` and `abandon` end it."""

    def __init__(
        self,
        spool_dir: Path,
        store: ObjectStore,
        meta: Mapping[str, str],
        shard: LeasedShard,
        facts: EngineFacts,
    ) -> None:
        """Prepare a folder of its own below `spool_dir`; `meta` goes into every footer."""
        self._store = store
        self._meta = meta
        self._shard = shard
        self._facts = RowFacts(facts.model, facts.revision, facts.dtype, facts.engine, facts.mode)
        self._folder = spool_dir / f"part-{shard.lease_token}"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._end_index = shard.end_index
        self._next_index = shard.first_index
        self._waiting: dict[int, _Waiting] = {}
        self._waiting_bytes = 0
        self._waiting_lock = threading.Lock()  # guards what waits; held for moments
        self._files_lock = threading.Lock()  # guards the files; held while rows are written
        self._results = ParquetFile(self._folder / "results", RESULTS, results_options(), meta)
        self._rows: list[Row] = []
        self._rows_bytes = 0
        self._captures = PartCaptures(self._folder, meta)
        self._untaken: list[tuple[Path, PublishedFile]] | None = None  # while `close` is not over
        self._files: tuple[PublishedFile, ...] = ()
        self._put: list[str] = []  # keys, each once, however often it was tried
        self._ended: str | None = None
        self._is_closing = False
        self._is_unwanted = False

    def add(self, work: Work, outcome: Outcome, *, cancelled_as: str = "cancelled") -> Outcome:
        """Take one request's outcome; writes every row whose turn has come.

        Returns the outcome that counts: an Errored instead of one that cannot be written
        (result_not_writable, activation_rows_mismatch, capture_conflict). The part writer releases
        the outcome when its captures are written or dropped. `cancelled_as` is the status of a
        Cancelled outcome: cancelled, or expired. Raises PartClosedError after the part ended,
        ValueError for a request of another range or one that was added before.
        """
        try:
            counts, item = self._prepare(work, outcome, cancelled_as)
        except BaseException:
            _release(outcome)
            raise
        try:
            self._enqueue(item)
        except BaseException:
            item.drop()
            raise
        self._write_ready()
        return counts

    def cut(self, end_index: int) -> None:
        """Let the part end before `end_index`: later requests are dropped, they will run again."""
        with self._files_lock, self._waiting_lock:
            if not self._shard.first_index < end_index <= self._end_index or (
                self._next_index > end_index
            ):
                msg = f"cannot cut at {end_index}: rows up to {self._next_index} are written"
                raise ValueError(msg)
            self._end_index = end_index
            for index in [index for index in self._waiting if index >= end_index]:
                self._waiting.pop(index).drop()

    def close(self) -> PublishedPart:
        """Write what waits, make the files durable, put them into the store; name them.

        Raises StoreAwayError when the store did not take a file: then everything is kept, for
        another `close` or for `abandon`. On any other error nothing is left in the spool folder,
        and what was put is deleted again.
        """
        with self._waiting_lock:
            self._is_closing = True
        try:
            with self._files_lock:
                return self._close()
        finally:
            with self._waiting_lock:
                self._is_closing = False
                is_unwanted = self._is_unwanted
            if is_unwanted:
                self.abandon()

    def abandon(self) -> None:
        """Delete everything that was written; no effect after `close` has returned.

        What the store took already stays there as an orphan: a store that is away would make each
        deletion as long as an upload. While another thread is in `close`, which may hang as long
        as the store does, this returns at once, and that thread cleans up.
        """
        with self._waiting_lock:
            self._is_unwanted = True
            if self._is_closing:
                return
        with self._files_lock:
            if self._ended is None:
                self._end("abandoned")
                self._clean_up()
            elif self._untaken is not None:
                self._untaken = None
                self._clean_up()

    def withdraw(self) -> None:
        """Delete what `close` put into the store, after the lease turned out to be lost."""
        self._unpublish()

    def _close(self) -> PublishedPart:
        if self._untaken is None:
            self._end("closed")
        try:
            if self._untaken is None:
                self._untaken = self._finish()
                self._files = tuple(file for _, file in self._untaken)
            self._hand_over(self._untaken)
        except StoreAwayError:
            raise
        except BaseException:
            self._untaken = None
            self._clean_up()
            self._unpublish()
            raise
        self._untaken = None
        self._clean_up()
        return PublishedPart(self._files)

    def _prepare(self, work: Work, outcome: Outcome, cancelled_as: str) -> tuple[Outcome, _Waiting]:
        counts, rows = writable_rows(
            RowName(work.request_index, work.custom_id, work.spec, self._shard.attempt),
            self._facts,
            outcome,
            refuse=lambda succeeded: self._captures.refuse(work, succeeded),
            cancelled_as=cancelled_as,
        )
        if counts is not outcome:
            _release(outcome)
        captured = None
        if isinstance(counts, Succeeded) and counts.captures:
            if self._ended is not None:  # the folder is gone
                raise PartClosedError(self._ended)
            captured = self._captures.shelve(work, _without_texts(counts))
        return counts, _Waiting(work, rows, captured, memory_bytes(work, counts))

    def _end(self, how: str) -> None:
        with self._waiting_lock:
            if self._ended is not None:
                raise PartClosedError(self._ended)
            self._ended = how

    def _write_ready(self) -> None:
        """Write rows in order as far as they go, unless another thread is doing just that."""
        while self._is_ready():
            if not self._files_lock.acquire(blocking=False):
                return
            try:
                while (item := self._pop_ready()) is not None:
                    self._write(item)
            except BaseException as error:
                with self._waiting_lock:
                    self._ended = f"broken: {error}"
                self._clean_up()
                raise
            finally:
                self._files_lock.release()

    def _is_ready(self) -> bool:
        with self._waiting_lock:
            return self._ended is None and self._next_index in self._waiting

    def _pop_ready(self) -> _Waiting | None:
        with self._waiting_lock:
            item = self._waiting.pop(self._next_index, None) if self._ended is None else None
            if item is not None:
                self._next_index += 1
                self._waiting_bytes -= 0 if item.spilled else item.bytes
            return item

    def _enqueue(self, item: _Waiting) -> None:
        index = item.work.request_index
        with self._waiting_lock:
            if self._ended is not None:
                raise PartClosedError(self._ended)
            if index in self._waiting or not self._next_index <= index < self._end_index:
                msg = f"request {index} was added before or is not of this shard"
                raise ValueError(msg)
            full = self._waiting_bytes + item.bytes > WAITING_BYTES_MAX
            if full and index != self._next_index:
                self._spill(item)
            else:
                self._waiting_bytes += item.bytes
            self._waiting[index] = item

    def _spill(self, item: _Waiting) -> None:
        """Put an item's rows into a file."""
        item.spilled = self._folder / f"waiting-{item.work.request_index}"
        with pa.OSFile(str(item.spilled), "wb") as sink, pa.ipc.new_file(sink, RESULTS) as file:
            file.write_batch(rows_batch(item.rows))
        item.rows = []

    def _unspill(self, path: Path) -> list[Row]:
        with pa.OSFile(str(path)) as source:
            rows: list[Row] = pa.ipc.open_file(source).get_batch(0).to_pylist()
        return rows

    def _write(self, item: _Waiting) -> None:
        try:
            self._rows += self._unspill(item.spilled) if item.spilled else item.rows
            self._rows_bytes += item.bytes
            if self._rows_bytes >= RESULTS_GROUP_BYTES or len(self._rows) >= RESULTS_GROUP_ROWS:
                self._flush_results()
            if item.captured is None:
                item.drop()
            else:
                self._captures.write(item.work, item.captured, item.drop)
        except BaseException:
            item.drop()
            raise

    def _flush_results(self) -> None:
        if self._rows:
            self._results.write(rows_batch(self._rows))
            self._rows = []
            self._rows_bytes = 0

    def _finish(self) -> list[tuple[Path, PublishedFile]]:
        """End every file of the spool, and name what it will be in the store."""
        for index in sorted(self._waiting):
            self._write(self._waiting.pop(index))
        self._flush_results()
        token, first = self._shard.lease_token, self._shard.first_index
        files = [self._file(self._results.finish(), "results", results_path(first, token))]
        files += [self._capture_file(capture) for capture in self._captures.finish()]
        if self._captures:
            moments = ParquetFile(
                self._folder / "moments", MOMENTS, statistics_options(), self._meta
            )
            moments.write(moments_table(self._captures.moments))
            files.append(self._file(moments.finish(), "moments", moments_path(first, token)))
        return files

    def _hand_over(self, untaken: list[tuple[Path, PublishedFile]]) -> None:
        while untaken:
            if self._is_unwanted:
                raise PartClosedError("abandoned")
            path, file = untaken[0]
            key = job_key(self._shard.job_id, file.path)
            if self._put[-1:] != [key]:
                self._put.append(key)
            try:
                self._store.take_file(path, key)
            except (OSError, StoreError) as error:
                if not path.exists():
                    raise
                raise StoreAwayError(str(error)) from error
            untaken.pop(0)

    def _capture_file(self, finished: FinishedCapture) -> tuple[Path, PublishedFile]:
        token, first = self._shard.lease_token, self._shard.first_index
        is_stream = finished.capture == RESIDUAL_STREAM
        path = capture_path(finished.capture, finished.layer, first, token)
        shape = finished.holds.shape
        kind: FileKind = "activations" if is_stream else "captures"
        local, file = self._file(finished.written, kind, path)
        return local, replace(
            file,
            layer=finished.layer,
            capture=None if is_stream else finished.capture,
            site=shape.site.value,
            before=shape.before,
            reduce=shape.reduce.value,
            width=finished.holds.width,
        )

    def _file(self, written: WrittenFile, kind: FileKind, path: str) -> tuple[Path, PublishedFile]:
        return written.path, PublishedFile(
            path=path,
            kind=kind,
            rows=written.rows,
            bytes=written.bytes,
            sha256=written.sha256,
            first_index=self._shard.first_index,
            end_index=self._end_index,
        )

    def _unpublish(self) -> None:
        """Delete what was put until the store fails once: orphans are collected a day later."""
        while self._put:
            key = self._put.pop()
            try:
                self._store.delete(key)
            except Exception as error:  # noqa: BLE001 (there is nobody who could do more)
                log.warning("part not deleted", extra={"key": key, "error": repr(error)})
                self._put.clear()

    def _clean_up(self) -> None:
        self._results.abandon()
        self._captures.abandon()
        for item in self._waiting.values():
            item.drop()
        self._waiting.clear()
        self._rows.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def _release(outcome: Outcome) -> None:
    if isinstance(outcome, Succeeded):
        outcome.release()


def _without_texts(outcome: Succeeded) -> Succeeded:
    """Keep what the captures need of an outcome, its token ids, unless it is small anyway."""
    if outcome.prompt_logprobs is None and all(
        choice.top_logprobs is None and len(choice.text) < SHORT_TEXT for choice in outcome.choices
    ):
        return outcome
    choices = tuple(
        replace(choice, text="", token_logprobs=None, top_logprobs=None)
        for choice in outcome.choices
    )
    return replace(outcome, choices=choices, prompt_logprobs=None)
