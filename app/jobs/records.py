"""Frozen records of Jobs, requests, shards, parts and workers, as read from their rows.

No SQL and no rules live here: claims.py, ending.py and lifecycle.py move the rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple
from uuid import UUID

from app.jobs.states import JobState, RequestState

FileKind = Literal[
    "results", "activations", "captures", "moments", "stats", "manifest", "checksums"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A row of `jobs`. The n_ counters and tokens_ sums change with the rows they count.

    `tokens_held` is what open Holds hold now; `expiry_began_at` marks a Job whose pending
    requests were expired and which ends as expired once leased shards are finished.
    """

    id: UUID
    account_id: UUID
    state: JobState
    name: str | None
    metadata: dict[str, str]
    model: str
    model_revision: str
    dtype: str
    engine: str | None
    reproducible: bool
    priority: int
    version: int
    sequence: int
    n_total: int
    n_running: int
    n_succeeded: int
    n_errored: int
    n_cancelled: int
    n_expired: int
    prompt_tokens: int
    completion_tokens: int
    tokens_held: int
    tokens_charged: int
    tokens_released: int
    created_at: datetime
    started_at: datetime | None
    ended_running_at: datetime | None
    finished_at: datetime | None
    expires_at: datetime
    cancel_requested_at: datetime | None
    expiry_began_at: datetime | None
    error_code: str | None
    error_message: str | None

    @property
    def n_terminal(self) -> int:
        """Count requests that are terminal."""
        return self.n_succeeded + self.n_errored + self.n_cancelled + self.n_expired

    @property
    def n_pending(self) -> int:
        """Count requests that wait: neither terminal nor in a leased shard."""
        return self.n_total - self.n_terminal - self.n_running

    @property
    def is_stopping(self) -> bool:
        """True when no request of this Job may start any more (cancel or expiry)."""
        return self.cancel_requested_at is not None or self.expiry_began_at is not None

    @property
    def stopped_as(self) -> RequestState:
        """Name the state of a request that stopping keeps from running."""
        cancelled = self.cancel_requested_at is not None
        return RequestState.cancelled if cancelled else RequestState.expired


def job_from_row(row: Mapping[str, Any]) -> Job:
    """Read a row of `jobs` (extra columns are ignored)."""
    values = {name: row[name] for name in _JOB_COLUMNS}
    values["state"] = JobState(values["state"])
    return Job(**values)


_JOB_COLUMNS = tuple(field.name for field in fields(Job))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """What a worker is: only Jobs pinned to the same model, revision, dtype and engine fit.

    `engine` is None until the engine has started; nothing is leased before.
    """

    worker_id: UUID
    model: str
    model_revision: str
    dtype: str
    engine: str | None
    host: str
    pid: int

    def with_engine(self, engine: str) -> "WorkerIdentity":
        """Name the engine ("vllm 0.32.0") once it runs."""
        return replace(self, engine=engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """What a worker tells with each heartbeat."""

    rss_bytes: int | None = None
    requests_running: int | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerControl:
    """What the heartbeat brings back: finish what runs, lease nothing more, exit."""

    drain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedShard:
    """A worker's lease: requests [first_index, end_index) of a Job under one token.

    After an engine death the shard is a suspect: it must run with nothing else in the engine
    (`run_alone`), so that only the request that kills engines is blamed. The shards of a
    reproducible Job are groups: each runs alone, and whole or not at all.
    """

    id: int
    job_id: UUID
    account_id: UUID
    first_index: int
    end_index: int
    lease_token: int
    attempt: int
    engine_deaths: int
    reproducible: bool

    @property
    def run_alone(self) -> bool:
        """True when no other shard may be in the engine at the same time."""
        return self.engine_deaths > 0 or self.reproducible


class WorkRow(NamedTuple):
    """One pending request of a shard; `spec` is JSON as app.completions.spec writes it."""

    request_index: int
    custom_id: str | None
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Control:
    """What the user wants of a leased shard: abort its requests, or start no more of them.

    `expired` says why to abort: aborted requests are expired, not cancelled.
    """

    cancel: bool
    pause: bool
    expired: bool = False


@dataclass(frozen=True, slots=True)
class RequestResult:
    """How one request of a shard ended.

    `state` is succeeded (with `completion_tokens`), errored (with `error_code` and message) or
    cancelled (not run to its end because the Job stops; stored as expired when it expired).
    """

    request_index: int
    state: RequestState
    completion_tokens: int | None = None
    error_code: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """One closed file in the object store; `path` is relative to the Job's folder.

    `layer`, `capture` and the index range are None where they do not apply. `site`, `before`,
    `reduce` and `width` (numbers a row) say what a file of activations or captures was read from.
    """

    path: str
    kind: FileKind
    rows: int
    bytes: int
    sha256: str
    layer: int | None = None
    capture: str | None = None
    first_index: int | None = None
    end_index: int | None = None
    site: str | None = None
    before: bool | None = None
    reduce: str | None = None
    width: int | None = None


@dataclass(frozen=True, slots=True)
class PublishedPart:
    """The files of one shard, complete in the object store before any row names them."""

    files: Sequence[PublishedFile]
