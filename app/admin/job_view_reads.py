"""What the page of one Job shows beside its row: shards, attempts, parts, the account's name.

A Job has at most some ten thousand shards, which the database counts into a few hundred cells;
files are summed by kind and listed by key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal
from uuid import UUID

from app.jobs.lifecycle import get_job
from app.jobs.progress import JobView, view_job
from app.jobs.records import Job, PublishedFile
from app.kit.db import Conn

CELLS_MAX: Final = 240
ATTEMPTS_MAX: Final = 20
FILES_SHOWN: Final = 8
FILES_PAGE: Final = 100

Stop = Literal["cancelled", "expired"]
Looks = Literal["waiting", "running", "done", "errors", "partly"] | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Neighbouring shards of a Job, drawn as one: requests [first_index, end_index)."""

    first_index: int
    end_index: int
    shards: int
    waiting: int
    running: int
    has_errors: bool
    stopped: Stop | None  # whether requests of it ended so
    attempts: int

    @property
    def looks(self) -> Looks:
        """How the cell is drawn."""
        if self.running:
            return "running"
        if self.waiting == self.shards:
            return "waiting"
        if self.waiting:
            return "partly"
        if self.stopped is not None:
            return self.stopped
        return "errors" if self.has_errors else "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """A shard that is worth a line: leased now, tried again, or suspected of killing engines."""

    id: int
    first_index: int
    end_index: int
    state: str
    attempt: int
    engine_deaths: int
    worker_id: UUID | None
    leased_at: datetime | None
    lease_expires_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class KindOfFiles:
    """How many files of a kind a Job has, how many rows and bytes they hold.

    `first_part_at`: when the earliest part with such a file was published; None: they are not of
    parts.
    """

    kind: str
    files: int
    rows: int
    bytes: int
    first_part_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPageView:
    """Everything that the page of a Job shows, of one moment."""

    view: JobView
    account: str
    cells: Sequence[Cell]
    shards: Sequence[ShardRow]
    kinds: Sequence[KindOfFiles]
    files: Sequence[PublishedFile]

    @property
    def job(self) -> Job:
        """The Job's row."""
        return self.view.job

    @property
    def first_part_at(self) -> datetime | None:
        """When the first part was published, of those that count."""
        return min((kind.first_part_at for kind in self.kinds if kind.first_part_at), default=None)


def read_job_page(conn: Conn, job_id: UUID) -> JobPageView | None:
    """Read what the page of a Job shows; None when there is no such Job."""
    job = get_job(conn, job_id)
    view = None if job is None else view_job(conn, job.account_id, job_id)
    if view is None:
        return None
    row = conn.execute(
        """
        SELECT accounts.name AS account
        FROM jobs JOIN accounts ON accounts.id = account_id WHERE jobs.id = %s
        """,
        [job_id],
    ).fetchone()
    assert row is not None
    return JobPageView(
        view=view,
        account=row["account"],
        cells=_cells(conn, view.job),
        shards=_notable_shards(conn, job_id),
        kinds=_kinds(conn, job_id),
        files=list_files(conn, job_id, limit=FILES_SHOWN),
    )


def list_files(
    conn: Conn, job_id: UUID, *, limit: int, after: str | None = None
) -> list[PublishedFile]:
    """List files that may be downloaded, by path, behind the path `after`."""
    rows = conn.execute(
        """
        SELECT f.path, f.kind, f.rows, f.bytes, f.sha256, f.layer, f.capture, f.first_index,
            f.end_index, f.site, f.before, f.reduce, f.width
        FROM result_files f LEFT JOIN parts p ON p.lease_token = f.lease_token
        WHERE f.job_id = %(job)s AND p.superseded_at IS NULL AND f.kind <> 'moments'
            AND (%(after)s::text IS NULL OR f.path > %(after)s)
        ORDER BY f.path LIMIT %(limit)s
        """,
        {"job": job_id, "after": after, "limit": limit},
    )
    return [PublishedFile(**row) for row in rows]


def _cells(conn: Conn, job: Job) -> list[Cell]:
    """Count the shards into at most CELLS_MAX cells of equal width in request_index."""
    rows = conn.execute(
        """
        SELECT first_index, end_index, shards, waiting, running, attempts, EXISTS (
            SELECT 1 FROM requests WHERE requests.job_id = %(job)s AND error_code IS NOT NULL
                AND request_index >= cells.first_index AND request_index < cells.end_index
        ) AS has_errors,
            -- Only what ended after the stop is looked at, and nearly all of that was stopped.
            -- Never null: what follows a null in an AND is looked at as well.
            CASE WHEN coalesce(last_ended_at >= %(stopped_at)s::timestamptz, false) AND EXISTS (
                SELECT 1 FROM requests WHERE requests.job_id = %(job)s AND state = %(stop)s::text
                    AND request_index >= cells.first_index AND request_index < cells.end_index
            ) THEN %(stop)s::text END AS stopped
        FROM (
            SELECT min(first_index) AS first_index, max(end_index) AS end_index,
                count(*)::integer AS shards,
                (count(*) FILTER (WHERE state = 'pending'))::integer AS waiting,
                (count(*) FILTER (WHERE state = 'leased'))::integer AS running,
                max(attempt) AS attempts, max(finished_at) AS last_ended_at
            FROM shards WHERE job_id = %(job)s
            GROUP BY CASE WHEN %(total)s <= %(cells)s THEN first_index
                ELSE (first_index::bigint * %(cells)s / %(total)s)::integer END
        ) AS cells ORDER BY first_index
        """,
        {
            "job": job.id,
            "total": max(job.n_total, 1),
            "cells": CELLS_MAX,
            "stop": "expired" if job.cancel_requested_at is None else "cancelled",
            "stopped_at": job.cancel_requested_at or job.expiry_began_at,
        },
    )
    return [Cell(**row) for row in rows]


def _notable_shards(conn: Conn, job_id: UUID) -> list[ShardRow]:
    rows = conn.execute(
        """
        SELECT id, first_index, end_index, state, attempt, engine_deaths, worker_id, leased_at,
            lease_expires_at, finished_at
        FROM shards WHERE job_id = %s AND (state = 'leased' OR attempt > 1 OR engine_deaths > 0)
        ORDER BY state = 'leased' DESC, engine_deaths DESC, attempt DESC, first_index LIMIT %s
        """,
        [job_id, ATTEMPTS_MAX],
    )
    return [ShardRow(**row) for row in rows]


def _kinds(conn: Conn, job_id: UUID) -> list[KindOfFiles]:
    rows = conn.execute(
        """
        SELECT f.kind, count(*)::integer AS files, sum(f.rows)::bigint AS rows,
            sum(f.bytes)::bigint AS bytes, min(p.published_at) AS first_part_at
        FROM result_files f LEFT JOIN parts p ON p.lease_token = f.lease_token
        WHERE f.job_id = %s AND p.superseded_at IS NULL AND f.kind <> 'moments'
        GROUP BY f.kind ORDER BY sum(f.bytes) DESC
        """,
        [job_id],
    )
    return [KindOfFiles(**row) for row in rows]
