"""The status board: one small file that tells the front what became of each request.

The front hands out tickets, the engine process writes flags and progress under them, every step,
before the step's tokens are returned. A ticket is first cleared by the front, then marked seen by
the engine: a request that the engine never saw is therefore known, too, and is never taken for a
steered one.
"""

from __future__ import annotations

from collections import deque
from enum import IntFlag
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

TICKETS = 16_384
_NEVER = np.iinfo(np.int64).max


class Flag(IntFlag):
    """What the engine reports about a request."""

    seen = 1
    non_finite = 2
    plan_failed = 4
    unknown_vector = 8


class StatusBoard:
    """Three int64 columns [ranks, TICKETS] in a mapped file: flags, first and done positions.

    `done` counts the positions whose rows have left the forward pass; `first` is the lowest one
    that ran (above 0 when a prefix came from the cache).
    """

    def __init__(self, path: Path, *, ranks: int = 1, create: bool = False) -> None:
        """Map the board at `path`; with `create`, write a new empty one first."""
        shape = (3, ranks, TICKETS)
        self._table: npt.NDArray[np.int64] = np.memmap(
            path, dtype=np.int64, mode="w+" if create else "r+", shape=shape
        )
        self.flags: npt.NDArray[np.int64] = self._table[0]
        self.first: npt.NDArray[np.int64] = self._table[1]
        self.done: npt.NDArray[np.int64] = self._table[2]

    def reset(self, ticket: int, rank: int, flags: Flag) -> None:
        """Start a ticket anew on one rank."""
        self.flags[rank, ticket] = flags
        self.first[rank, ticket] = _NEVER
        self.done[rank, ticket] = 0

    def advance(
        self,
        rank: int,
        tickets: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
    ) -> None:
        """Note that positions [start, end) of each ticket ran in this step."""
        self.first[rank, tickets] = np.minimum(self.first[rank, tickets], starts)
        self.done[rank, tickets] = np.maximum(self.done[rank, tickets], ends)


class Tickets:
    """The front's side of the board: hands tickets out, oldest free one first."""

    def __init__(self, board: StatusBoard) -> None:
        """Start with every ticket free."""
        self._board = board
        self._free = deque(range(TICKETS))

    def take(self) -> int:
        """Return a cleared ticket; raise RuntimeError when more requests run than tickets exist."""
        if not self._free:
            msg = f"more than {TICKETS} steered or captured requests at once"
            raise RuntimeError(msg)
        ticket = self._free.popleft()
        for rank in range(len(self._board.flags)):
            self._board.reset(ticket, rank, Flag(0))
        return ticket

    def give_back(self, ticket: int) -> None:
        """Make a ticket free again, at the end of the queue."""
        self._free.append(ticket)

    def flags(self, ticket: int) -> Flag:
        """Return what any rank reported; `seen` only when every rank saw the request."""
        column = self._board.flags[:, ticket]
        anyone = int(np.bitwise_or.reduce(column))
        everyone = int(np.bitwise_and.reduce(column))
        return Flag(anyone & ~Flag.seen | everyone & Flag.seen)

    def span(self, ticket: int) -> tuple[int, int]:
        """Return the half-open range of positions that ran, on the first rank."""
        done = int(self._board.done[0, ticket])
        return min(int(self._board.first[0, ticket]), done), done
