"""Parts for requests that no worker published: cancelled, expired or errored without a run.

Every terminal request has its row in exactly one live part, so that a reader of the files alone
misses nobody. Ranges are those of done shards that no live part covers, neighbours joined. The
part goes in under a fresh token; if another process was faster, its part stays and ours goes.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import UUID

from app.completions.spec import spec_from_json
from app.jobs.lifecycle import insert_files, lock_job
from app.jobs.records import Job, PublishedFile
from app.jobs.states import RequestState
from app.kit.db import Conn, Database
from app.kit.ids import public_id
from app.results.parquet_file import ParquetFile, WrittenFile
from app.results.paths import results_path
from app.results.rows import Row, RowFacts, RowName, row_without_text, rows_batch
from app.results.schema import RESULTS, RESULTS_GROUP_ROWS, SCHEMA_VERSION, results_options
from app.storage import ObjectStore, job_key

PART_REQUESTS_MAX = 8192
_WITHOUT_TEXT = (RequestState.errored, RequestState.cancelled, RequestState.expired)


class ResultMissingError(Exception):
    """A request succeeded, but no live part holds its result: a broken invariant."""


@dataclass(frozen=True, slots=True)
class IndexRange:
    """The requests [first_index, end_index)."""

    first_index: int
    end_index: int


def write_missing_parts(database: Database, store: ObjectStore, job: Job) -> int:
    """Write and record a part for every range that has none; return how many were recorded.

    Raises ResultMissingError when such a range holds a request that succeeded.
    """
    ranges = database.run(lambda conn: uncovered_ranges(conn, job.id))
    return sum(_write_part(database, store, job, item) for item in ranges)


def uncovered_ranges(conn: Conn, job_id: UUID) -> list[IndexRange]:
    """List the ranges of done shards that no live part covers, joined up to a bound."""
    rows = conn.execute(
        """
        SELECT s.first_index, s.end_index FROM shards s
        WHERE s.job_id = %(job)s AND s.state = 'done' AND NOT EXISTS (
            SELECT FROM parts p
            WHERE p.job_id = s.job_id AND p.superseded_at IS NULL
                AND p.first_index <= s.first_index AND s.end_index <= p.end_index)
        ORDER BY s.first_index
        """,
        {"job": job_id},
    ).fetchall()
    joined: list[IndexRange] = []
    for row in rows:
        first, end = row["first_index"], row["end_index"]
        last = joined[-1] if joined else None
        if last and last.end_index == first and end - last.first_index <= PART_REQUESTS_MAX:
            joined[-1] = IndexRange(last.first_index, end)
        else:
            joined.append(IndexRange(first, end))
    return joined


def _write_part(database: Database, store: ObjectStore, job: Job, missing: IndexRange) -> bool:
    token = database.run(_new_token)
    path = results_path(missing.first_index, token)
    with tempfile.TemporaryDirectory(prefix="tiller-part-") as folder:
        written = _write_rows(database, job, missing, Path(folder) / "results", token)
        store.take_file(written.path, job_key(job.id, path))
    file = PublishedFile(
        path=path,
        kind="results",
        rows=written.rows,
        bytes=written.bytes,
        sha256=written.sha256,
        first_index=missing.first_index,
        end_index=missing.end_index,
    )
    recorded = database.run(lambda conn: _record(conn, job, token, file))
    if not recorded:
        store.delete(job_key(job.id, path))
    return recorded


def _new_token(conn: Conn) -> int:
    row = conn.execute("SELECT nextval('lease_tokens') AS token").fetchone()
    assert row is not None
    token: int = row["token"]
    return token


def _write_rows(
    database: Database, job: Job, missing: IndexRange, path: Path, token: int
) -> WrittenFile:
    footer = {
        "schema_version": SCHEMA_VERSION,
        "job_id": public_id("job", job.id),
        "lease_token": str(token),
        "model": job.model,
        "revision": job.model_revision,
    }
    facts = RowFacts(job.model, job.model_revision, job.dtype, None, None)
    with ParquetFile(path, RESULTS, results_options(), footer) as file:
        for rows in _pages(database, job.id, missing, facts):
            file.write(rows_batch(rows))
        return file.finish()


def _pages(
    database: Database, job_id: UUID, missing: IndexRange, facts: RowFacts
) -> Iterator[list[Row]]:
    for start in range(missing.first_index, missing.end_index, RESULTS_GROUP_ROWS):
        end = min(start + RESULTS_GROUP_ROWS, missing.end_index)
        page = IndexRange(start, end)
        yield database.run(partial(_read_rows, job_id=job_id, page=page, facts=facts))


def _read_rows(conn: Conn, job_id: UUID, page: IndexRange, facts: RowFacts) -> list[Row]:
    found = conn.execute(
        """
        SELECT request_index, custom_id, state, spec, attempt, error_code, error_message,
            finished_at
        FROM requests
        WHERE job_id = %(job)s AND request_index >= %(first)s AND request_index < %(end)s
        ORDER BY request_index
        """,
        {"job": job_id, "first": page.first_index, "end": page.end_index},
    ).fetchall()
    rows = []
    for item in found:
        if item["state"] not in _WITHOUT_TEXT:
            msg = f"request {item['request_index']} of Job {job_id} is {item['state']}, no part"
            raise ResultMissingError(msg)
        name = RowName(
            item["request_index"], item["custom_id"], spec_from_json(item["spec"]), item["attempt"]
        )
        rows.append(
            row_without_text(
                name,
                facts,
                item["state"],
                error=(item["error_code"], item["error_message"]),
                finished_at=item["finished_at"],
            )
        )
    return rows


def _record(conn: Conn, job: Job, token: int, file: PublishedFile) -> bool:
    """Name the part in the database, unless the Job moved on or a live part is in its place.

    True also when an earlier try of the same call named it and its answer was lost.
    """
    now = lock_job(conn, job.id)
    if now is None or (now.state, now.version) != (job.state, job.version):
        return False
    known = conn.execute("SELECT 1 FROM parts WHERE lease_token = %s", [token]).fetchone()
    if known is not None:
        return True
    recorded = conn.execute(
        """
        INSERT INTO parts (lease_token, job_id, first_index, end_index)
        SELECT %(token)s, %(job)s, %(first)s, %(end)s
        WHERE NOT EXISTS (
            SELECT FROM parts
            WHERE job_id = %(job)s AND superseded_at IS NULL
                AND first_index < %(end)s AND %(first)s < end_index)
        """,
        {"token": token, "job": job.id, "first": file.first_index, "end": file.end_index},
    ).rowcount
    if recorded:
        insert_files(conn, job.id, [file], lease_token=token)
    return bool(recorded)
