"""The end of a Job: rows for requests that never ran, stats, manifest, checksums, terminal state.

    begin_finalizing -> missing parts -> stats.parquet -> manifest.json, SHA256SUMS -> complete_job

A crash anywhere leaves a Job that the next call finishes: each step finds what is done already,
and the three files have the same bytes whoever writes them, because nothing of the Job changes
any more. One process at a time does it; the database decides which files count.
"""

import hashlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from app.jobs.lifecycle import (
    begin_finalizing,
    complete_job,
    get_job,
    next_state,
    try_lock_finalizer,
)
from app.jobs.records import FileKind, Job, PublishedFile
from app.kit.db import Database
from app.kit.ids import public_id
from app.results.manifest import (
    listed_files,
    model_shape,
    moments_files,
    render_checksums,
    render_manifest,
)
from app.results.missing_parts import write_missing_parts
from app.results.moments import merged_stats
from app.results.parquet_file import ParquetFile
from app.results.paths import CHECKSUMS, MANIFEST, STATS
from app.results.schema import SCHEMA_VERSION, statistics_options
from app.results.schema import STATS as STATS_SCHEMA
from app.storage import ObjectStore, job_key

log = logging.getLogger(__name__)


def finalize_job(database: Database, store: ObjectStore, job_id: UUID) -> bool:
    """Finish a Job whose requests are all terminal; True when this call made it terminal.

    False when requests are left, when it is over already, or while another process finishes it.
    May be called at any time, any number of times. Raises what database and store raise.
    """
    job = database.run(lambda conn: begin_finalizing(conn, job_id))
    if job is None:
        return False
    with database.transaction() as lock:
        # The transaction waits on the object store; a process that dies gives the lock back.
        lock.execute("SET LOCAL idle_in_transaction_session_timeout = '15min'")
        if not try_lock_finalizer(lock, job_id):
            return False
        return _finalize(database, store, job)


def _finalize(database: Database, store: ObjectStore, begun: Job) -> bool:
    write_missing_parts(database, store, begun)
    job = database.run(lambda conn: get_job(conn, begun.id))
    if job is None or job.state.is_terminal or job.version != begun.version:
        return False
    stats = _put_stats(database, store, job)
    files = database.run(lambda conn: listed_files(conn, job.id))
    files = sorted([*files, *stats], key=lambda file: file.path)
    manifest = render_manifest(job, files, model_shape(store, job, files), ends_as=next_state(job))
    own = [
        *stats,
        _put_bytes(store, job, "manifest", MANIFEST, manifest),
        _put_bytes(store, job, "checksums", CHECKSUMS, render_checksums(files, manifest)),
    ]
    ended = database.run(lambda conn: complete_job(conn, job.id, own))
    log.info(
        "job ended",
        extra={"job_id": public_id("job", job.id), "state": ended.state.value, "files": len(files)},
    )
    return True


def _put_stats(database: Database, store: ObjectStore, job: Job) -> list[PublishedFile]:
    """Merge the moments of all parts into stats.parquet; nothing when nothing was captured."""
    moments = database.run(lambda conn: moments_files(conn, job.id))
    merged = merged_stats(_moments_of(store, job, moments))
    if not merged.num_rows:
        return []
    footer = {"schema_version": SCHEMA_VERSION, "job_id": public_id("job", job.id)}
    with tempfile.TemporaryDirectory(prefix="tiller-stats-") as folder:
        path = Path(folder) / STATS
        with ParquetFile(path, STATS_SCHEMA, statistics_options(), footer) as file:
            file.write(merged)
            written = file.finish()
        store.take_file(path, job_key(job.id, STATS))
    return [
        PublishedFile(
            path=STATS,
            kind="stats",
            rows=written.rows,
            bytes=written.bytes,
            sha256=written.sha256,
        )
    ]


def _moments_of(store: ObjectStore, job: Job, files: Sequence[PublishedFile]) -> Iterator[pa.Table]:
    for file in files:
        content = store.get_bytes(job_key(job.id, file.path))
        yield pq.read_table(pa.BufferReader(content), page_checksum_verification=True)


def _put_bytes(
    store: ObjectStore, job: Job, kind: FileKind, path: str, content: bytes
) -> PublishedFile:
    store.put_bytes(content, job_key(job.id, path))
    return PublishedFile(
        path=path,
        kind=kind,
        rows=0,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
