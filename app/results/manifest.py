"""The manifest of a Job: what there is to download, and what it says about the run.

While a Job lives it is rendered from Postgres, so it lists exactly the parts whose transaction
committed. When the Job ends the same function renders the file manifest.json; from then on that
file is the manifest, and it never changes.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from app.jobs.records import FileKind, Job, PublishedFile
from app.jobs.states import JobState
from app.kit.db import Conn
from app.kit.ids import public_id
from app.results.paths import MANIFEST
from app.results.schema import SCHEMA_VERSION
from app.storage import ObjectStore, job_key

LISTED_KINDS: Final[tuple[FileKind, ...]] = ("results", "activations", "captures", "stats")
_TAIL_BYTES = 8  # a Parquet file ends with the length of its footer and a magic word


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The size of the model that ran, as the footers of its parts say; None before any part."""

    hidden_size: int | None = None
    n_layers: int | None = None


def listed_files(conn: Conn, job_id: UUID) -> list[PublishedFile]:
    """List the files that a user may download, by path; parts that were replaced are left out."""
    return _live_files(conn, job_id, LISTED_KINDS)


def moments_files(conn: Conn, job_id: UUID) -> list[PublishedFile]:
    """List the moments of a Job's live parts, by path, which is by first index."""
    return _live_files(conn, job_id, ("moments",))


def _live_files(conn: Conn, job_id: UUID, kinds: Sequence[str]) -> list[PublishedFile]:
    rows = conn.execute(
        """
        SELECT f.path, f.kind, f.rows, f.bytes, f.sha256, f.layer, f.capture, f.first_index,
            f.end_index, f.site, f.before, f.reduce, f.width
        FROM result_files f LEFT JOIN parts p ON p.lease_token = f.lease_token
        WHERE f.job_id = %(job)s AND p.superseded_at IS NULL AND f.kind = ANY(%(kinds)s)
        ORDER BY f.path COLLATE "C"
        """,
        {"job": job_id, "kinds": list(kinds)},
    ).fetchall()
    return [PublishedFile(**row) for row in rows]


def find_file(conn: Conn, job_id: UUID, path: str) -> PublishedFile | None:
    """Find one file that may be downloaded, the manifest and the checksums included."""
    row = conn.execute(
        """
        SELECT f.path, f.kind, f.rows, f.bytes, f.sha256, f.layer, f.capture, f.first_index,
            f.end_index, f.site, f.before, f.reduce, f.width
        FROM result_files f LEFT JOIN parts p ON p.lease_token = f.lease_token
        WHERE f.job_id = %(job)s AND f.path = %(path)s AND p.superseded_at IS NULL
            AND f.kind <> 'moments'
        """,
        {"job": job_id, "path": path},
    ).fetchone()
    return None if row is None else PublishedFile(**row)


def model_shape(store: ObjectStore, job: Job, files: Iterable[PublishedFile]) -> ModelShape:
    """Read from the footer of the first part that an engine wrote how big the model is."""
    if job.engine is None:
        return ModelShape()
    for file in files:
        if file.kind == "results":
            footer = _footer(store, job_key(job.id, file.path), file.bytes)
            if b"hidden_size" in footer:
                return ModelShape(int(footer[b"hidden_size"]), int(footer[b"n_layers"]))
    return ModelShape()


def _footer(store: ObjectStore, key: str, size: int) -> dict[bytes, bytes]:
    tail = store.get_range(key, size - _TAIL_BYTES, size)
    length = int.from_bytes(tail[:4], "little")
    content = store.get_range(key, size - _TAIL_BYTES - length, size)
    footer: dict[bytes, bytes] = pq.read_metadata(pa.BufferReader(b"PAR1" + content)).metadata
    return footer or {}


def render_manifest(
    job: Job, files: Sequence[PublishedFile], shape: ModelShape, *, ends_as: JobState | None = None
) -> bytes:
    """Write the manifest as JSON; the same input gives the same bytes.

    `ends_as` is for the moment before a Job ends: it is described as it will be then.
    """
    state = ends_as or job.state
    body: dict[str, Any] = {
        "object": "job.manifest",
        "schema_version": SCHEMA_VERSION,
        "job_id": public_id("job", job.id),
        "version": job.version,
        "sequence": job.sequence + (1 if ends_as else 0),
        "complete": state.is_terminal,
        "status": state.value,
        "created_at": _seconds(job.created_at),
        "started_at": _seconds(job.started_at),
        "ended_at": _seconds(job.ended_running_at),
        "counts": _counts(job),
        "usage": _usage(job),
        "accounting": _accounting(job),
        "model": {
            "id": job.model,
            "revision": job.model_revision,
            "hidden_size": shape.hidden_size,
            "n_layers": shape.n_layers,
            "dtype": job.dtype,
        },
        "engine": job.engine,
        "bytes": sum(file.bytes for file in files),
        "root_sha256": root_digest(files),
        "files": [_entry(file) for file in files],
    }
    return orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def root_digest(files: Iterable[PublishedFile]) -> str:
    """Give one digest for all files: sha256 of their sorted lines in SHA256SUMS."""
    return hashlib.sha256("".join(_checksum_lines(files)).encode()).hexdigest()


def render_checksums(files: Iterable[PublishedFile], manifest: bytes) -> bytes:
    """Write SHA256SUMS as `sha256sum -c` reads it from the Job's folder."""
    own = f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"
    return "".join(sorted([*_checksum_lines(files), own])).encode()


def _checksum_lines(files: Iterable[PublishedFile]) -> list[str]:
    return sorted(f"{file.sha256}  {file.path}\n" for file in files)


def _entry(file: PublishedFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "kind": file.kind,
        "rows": file.rows,
        "bytes": file.bytes,
        "sha256": file.sha256,
        "layer": file.layer,
        "capture": file.capture,
        "site": file.site,
        "when": None if file.before is None else "before" if file.before else "after",
        "reduce": file.reduce,
        "width": file.width,
        "first_index": file.first_index,
        "end_index": file.end_index,
    }


def _counts(job: Job) -> dict[str, int]:
    return {
        "total": job.n_total,
        "pending": job.n_pending,
        "running": job.n_running,
        "succeeded": job.n_succeeded,
        "errored": job.n_errored,
        "cancelled": job.n_cancelled,
        "expired": job.n_expired,
    }


def _usage(job: Job) -> dict[str, int]:
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.completion_tokens,
        "total_tokens": job.prompt_tokens + job.completion_tokens,
        "held": job.tokens_held,
        "charged": job.tokens_charged,
        "released": job.tokens_released,
    }


def _accounting(job: Job) -> dict[str, float | None]:
    """Say where the wall clock went, in seconds, from the Job's row alone: same row, same bytes.

    GET /v1/jobs/{id} knows more (engine start, publishing), which depends on when it is asked.
    """
    waited_until = job.started_at or job.ended_running_at
    return {
        "queued": _between(job.created_at, waited_until),
        "running": _between(waited_until, job.ended_running_at),
        "total": _between(job.created_at, job.ended_running_at),
    }


def _between(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else round((end - start).total_seconds(), 3)


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
