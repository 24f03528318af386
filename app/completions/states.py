"""The states of a Completion, and every legal move between them.

    pending -> running -> succeeded | errored | cancelled | expired
    pending -> errored (nobody took it) | cancelled (its client left) | expired

A Completion runs once: a worker that dies takes it along, and its client sends it again.
"""

from enum import StrEnum


class CompletionState(StrEnum):
    """Where a Completion stands."""

    pending = "pending"
    running = "running"
    succeeded = "succeeded"
    errored = "errored"
    cancelled = "cancelled"
    expired = "expired"


COMPLETION_MOVES: dict[CompletionState, frozenset[CompletionState]] = {
    CompletionState.pending: frozenset(
        {
            CompletionState.running,
            CompletionState.errored,
            CompletionState.cancelled,
            CompletionState.expired,
        }
    ),
    CompletionState.running: frozenset(
        {
            CompletionState.succeeded,
            CompletionState.errored,
            CompletionState.cancelled,
            CompletionState.expired,
        }
    ),
    CompletionState.succeeded: frozenset(),
    CompletionState.errored: frozenset(),
    CompletionState.cancelled: frozenset(),
    CompletionState.expired: frozenset(),
}


def states_before(after: CompletionState) -> list[str]:
    """List the states that may become `after`: the guard in the WHERE of a move."""
    return sorted(state for state, moves in COMPLETION_MOVES.items() if after in moves)
