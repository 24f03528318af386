"""The states of Jobs, requests and shards, and every legal move between them.

    Job:      draft -> validating -> queued -> in_progress <-> paused
              in_progress | queued -> finalizing -> completed | failed
              queued | in_progress | paused -> cancelling -> cancelled
              queued | in_progress | paused -> finalizing -> expired
              a user's retry reopens a terminal Job: -> queued, version + 1
    request:  pending -> running -> succeeded | errored | cancelled | expired
    shard:    pending -> leased -> done, or back to pending when its lease ends

A request is stored as pending until it is terminal. `running` is what a pending request is
called while its shard is leased: one fact in one place, and a lease costs one row, not 256
(docs/decisions/0004). Nothing outside this module lists states or moves.
"""

from enum import StrEnum


class JobState(StrEnum):
    """Where a Job stands; terminal states change only by a user's retry."""

    draft = "draft"
    validating = "validating"
    queued = "queued"
    in_progress = "in_progress"
    paused = "paused"
    cancelling = "cancelling"
    finalizing = "finalizing"
    completed = "completed"
    failed = "failed"
    cancelled = "cancelled"
    expired = "expired"

    @property
    def is_terminal(self) -> bool:
        """True when nothing of this Job will run any more."""
        return self in JOB_TERMINAL


class RequestState(StrEnum):
    """Where a request stands."""

    pending = "pending"
    running = "running"
    succeeded = "succeeded"
    errored = "errored"
    cancelled = "cancelled"
    expired = "expired"

    @property
    def is_terminal(self) -> bool:
        """True when the request's Hold is resolved and its result is final."""
        return self in REQUEST_TERMINAL


class ShardState(StrEnum):
    """Where a shard stands: free, under a lease, or with every request terminal."""

    pending = "pending"
    leased = "leased"
    done = "done"


JOB_TERMINAL = frozenset(
    {JobState.completed, JobState.failed, JobState.cancelled, JobState.expired}
)
REQUEST_TERMINAL = frozenset(
    {
        RequestState.succeeded,
        RequestState.errored,
        RequestState.cancelled,
        RequestState.expired,
    }
)
# Shards of these Jobs may be leased.
JOB_CLAIMABLE = frozenset({JobState.queued, JobState.in_progress})

JOB_MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.draft: frozenset({JobState.validating, JobState.queued, JobState.cancelled}),
    JobState.validating: frozenset({JobState.queued, JobState.failed, JobState.cancelling}),
    JobState.queued: frozenset(
        {JobState.in_progress, JobState.paused, JobState.cancelling, JobState.finalizing}
    ),
    JobState.in_progress: frozenset({JobState.paused, JobState.cancelling, JobState.finalizing}),
    JobState.paused: frozenset(
        {JobState.queued, JobState.in_progress, JobState.cancelling, JobState.finalizing}
    ),
    JobState.cancelling: frozenset({JobState.cancelled}),
    JobState.finalizing: frozenset({JobState.completed, JobState.failed, JobState.expired}),
    JobState.completed: frozenset({JobState.queued}),
    JobState.failed: frozenset({JobState.queued}),
    JobState.cancelled: frozenset({JobState.queued}),
    JobState.expired: frozenset({JobState.queued}),
}

REQUEST_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.pending: frozenset(
        {RequestState.running, RequestState.cancelled, RequestState.expired}
    ),
    RequestState.running: frozenset(
        {
            RequestState.pending,
            RequestState.succeeded,
            RequestState.errored,
            RequestState.cancelled,
            RequestState.expired,
        }
    ),
    RequestState.succeeded: frozenset(),
    RequestState.errored: frozenset({RequestState.pending}),
    RequestState.cancelled: frozenset({RequestState.pending}),
    RequestState.expired: frozenset({RequestState.pending}),
}

SHARD_MOVES: dict[ShardState, frozenset[ShardState]] = {
    ShardState.pending: frozenset({ShardState.leased, ShardState.done}),
    ShardState.leased: frozenset({ShardState.pending, ShardState.done}),
    ShardState.done: frozenset({ShardState.pending}),
}


def job_may_move(before: JobState, after: JobState) -> bool:
    """Tell whether a Job in `before` may become `after`."""
    return after in JOB_MOVES[before]


def states_before(after: JobState) -> list[str]:
    """List the Job states that may become `after`: the guard in the WHERE of a move."""
    return sorted(state for state, moves in JOB_MOVES.items() if after in moves)
