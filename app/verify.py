"""`python -m app verify`: is what the database says true, and is every file there that it names?

For operators, after a restore above all. The rules are those of the reconciler's hourly check, on
one snapshot; the files are those of parts that count and of finished Jobs. Nothing is changed.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.jobs.audit_runs import run_rules, snapshot
from app.kit.db import Conn, Database
from app.storage import ObjectStore, job_key

PAGE: Final = 1000
READS_AT_ONCE: Final = 16
STATEMENT_SECONDS: Final = 3600.0  # a service that was just restored can wait; a rule may not fail
FIRST: Final = UUID(int=0)


class VerifySettings(BaseSettings):
    """Where database and files are; any of our containers knows both."""

    model_config = SettingsConfigDict(env_prefix="TILLER_", frozen=True, extra="ignore")

    database_url: str = Field(description="postgresql://… of the one truth.")
    object_store: str = Field(description="file:///… or s3://bucket/prefix for parts.")


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file as its row in Postgres describes it; `path` is relative to the Job's folder."""

    job_id: UUID
    path: str
    bytes: int
    sha256: str

    @property
    def key(self) -> str:
        """Its name in the object store."""
        return job_key(self.job_id, self.path)


def broken_rules(database: Database) -> list[str]:
    """Run every rule on one snapshot; give a line for each row that breaks one."""
    with snapshot(database, statement_seconds=STATEMENT_SECONDS) as conn:
        outcomes = run_rules(conn)
    late = [rule.name for rule in outcomes if rule.outcome == "unfinished"]
    return [
        *(f"rule {name} was not checked in time" for name in late),
        *(
            f"rule {found.invariant} ({found.sentence}) is broken: {found.subject}: {found.detail}"
            for rule in outcomes
            for found in rule.violations
        ),
    ]


def wrong_files(
    database: Database, store: ObjectStore, *, contents: bool
) -> Iterator[list[str | None]]:
    """Compare every named file with its row, page by page: a reason for each, None where it fits.

    Sizes are compared, and with `contents` the sha256 too, which reads everything. Raises what
    the store raises when it cannot be reached.
    """
    look = partial(_difference, store, contents=contents)
    after = (FIRST, "")
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        while files := database.run(partial(_files_after, after=after)):
            yield list(pool.map(look, files))
            after = (files[-1].job_id, files[-1].path)


def _difference(store: ObjectStore, file: NamedFile, *, contents: bool) -> str | None:
    meta = store.head(file.key)
    if meta is None:
        return f"file {file.key} is missing"
    if meta.size != file.bytes:
        return f"file {file.key} has {meta.size} bytes, its row says {file.bytes}"
    if contents:
        digest = hashlib.sha256()
        for piece in store.stream_range(file.key, 0, file.bytes):
            digest.update(piece)
        if digest.hexdigest() != file.sha256:
            return f"file {file.key} has another sha256 than its row"
    return None


def _files_after(conn: Conn, after: tuple[UUID, str]) -> list[NamedFile]:
    rows = conn.execute(
        """
        SELECT f.job_id, f.path, f.bytes, f.sha256
        FROM result_files f LEFT JOIN parts p ON p.lease_token = f.lease_token
        WHERE p.superseded_at IS NULL AND (f.job_id, f.path) > (%(job_id)s, %(path)s)
        ORDER BY f.job_id, f.path LIMIT %(limit)s
        """,
        {"job_id": after[0], "path": after[1], "limit": PAGE},
    ).fetchall()
    return [NamedFile(**row) for row in rows]
