"""Deletes objects that no live row names: what a crash between put and commit leaves behind.

Only objects older than a day are touched: no lease, no finalizer and no download lives that
long. The Job's own files (manifest, checksums, stats) are left to whoever finishes the Job.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice
from uuid import UUID

from app.kit.db import Conn, Database
from app.results.paths import CHECKSUMS, MANIFEST, STATS
from app.storage import ObjectMeta, ObjectStore

_JOB_FILES = frozenset({MANIFEST, CHECKSUMS, STATS})
_BATCH = 1000


def collect_orphan_parts(
    database: Database, store: ObjectStore, older_than_hours: float = 24
) -> int:
    """Delete old objects that no live part names, and old unfinished uploads; count them."""
    before = database.run(_now) - timedelta(hours=older_than_hours)
    count = store.delete_stale_uploads(before)
    old = (meta for meta in store.list("jobs") if meta.modified_at < before)
    while batch := list(islice(old, _BATCH)):
        for key in _orphans(database, batch, before):
            store.delete(key)
            count += 1
    return count


def _orphans(database: Database, batch: Sequence[ObjectMeta], before: datetime) -> Iterator[str]:
    named = {}
    for meta in batch:
        folder, _, path = meta.key.removeprefix("jobs/").partition("/")
        try:
            named[meta.key] = (UUID(hex=folder), path)
        except ValueError:
            continue  # not a Job's folder: not ours to delete
    kept = database.run(lambda conn: _kept(conn, list(named.values()), before))
    yield from (key for key, name in named.items() if name not in kept)


def _kept(conn: Conn, names: Sequence[tuple[UUID, str]], before: datetime) -> set[tuple[UUID, str]]:
    """Choose the files that stay: those of live or lately replaced parts, and of the Job itself."""
    rows = conn.execute(
        """
        SELECT asked.job_id, asked.path
        FROM unnest(%(jobs)s::uuid[], %(paths)s::text[]) AS asked (job_id, path)
        JOIN jobs ON jobs.id = asked.job_id
        LEFT JOIN result_files f ON f.job_id = asked.job_id AND f.path = asked.path
        LEFT JOIN parts p ON p.lease_token = f.lease_token
        WHERE asked.path = ANY(%(own)s)
            OR (f.path IS NOT NULL AND (p.superseded_at IS NULL OR p.superseded_at > %(before)s))
        """,
        {
            "jobs": [job_id for job_id, _ in names],
            "paths": [path for _, path in names],
            "own": sorted(_JOB_FILES),
            "before": before,
        },
    ).fetchall()
    return {(row["job_id"], row["path"]) for row in rows}


def _now(conn: Conn) -> datetime:
    row = conn.execute("SELECT now() AS now").fetchone()
    assert row is not None
    now: datetime = row["now"]
    return now
