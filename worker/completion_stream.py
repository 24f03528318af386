"""Tokens of streamed Completions on their way into Redis.

    engine -> give (on the event loop) -> pending -> one round trip for all streams -> Redis

While one round trip runs, what comes next is gathered; so a step of the engine costs one at most,
whatever the number of streams. A stream that Redis does not take has failed, and its Completion
with it. Nothing here decides an end: rows in Postgres do.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from uuid import UUID

from app.completions.line import BROKER_ERRORS, Line, TokenEntry
from app.completions.records import ClaimedCompletion, Failure
from worker.completion_answer import pieces_bytes
from worker.engine.protocol import Piece

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.02  # between two round trips: nobody reads faster
SPARE_ENTRIES = 16
UNWRITTEN = Failure("engine_error", "The worker could not write this answer.")
NO_BROKER = Failure("broker_unavailable", "The answer could not be sent back. Send it again.")

Failed = Callable[[], None]
WritePieces = Callable[[Sequence[tuple[int, Piece]]], bytes]


class InThread(Protocol):
    """Runs blocking work to its end off the event loop."""

    def __call__(self, work: Callable[[], list["Trouble"]]) -> Awaitable[list["Trouble"]]:
        """Give what the work gave."""


class TokenStream:
    """The tokens of one Completion; `generated` counts them as the engine made them."""

    def __init__(
        self,
        completion_id: UUID,
        entries_max: int,
        *,
        wake: Callable[[], None],
        failed: Failed,
        write: WritePieces,
    ) -> None:
        """Call `wake` when there is something to send, and `failed` once nothing can be sent."""
        self.completion_id = completion_id
        self.write = write
        self.generated = 0
        self.failure: Failure | None = None
        self._entries_max = entries_max
        self._wake = wake
        self._failed = failed
        self._pending: list[tuple[int, Piece]] = []
        self._number = 0
        self._is_sent = asyncio.Event()
        self._is_sent.set()

    def give(self, place: int, piece: Piece) -> None:
        """Take a piece of the prompt at `place`; on the event loop."""
        self.generated += len(piece.token_ids)
        self._pending.append((place, piece))
        self._is_sent.clear()
        self._wake()

    async def sent(self) -> None:
        """Wait until all that was given is in Redis, or the stream has failed."""
        await self._is_sent.wait()

    def take(self) -> "Parcel | None":
        """Take out what waits, as one entry."""
        if not self._pending or self.failure is not None:
            return None
        pieces, self._pending = self._pending, []
        self._number += 1
        return Parcel(self, self._number - 1, pieces, self._entries_max)

    def settle(self, failure: Failure | None) -> None:
        """Note that what was taken is in Redis, or why it is not."""
        if failure is not None and self.failure is None:
            self.failure = failure
            self._failed()
        if self.failure is not None or not self._pending:
            self._is_sent.set()


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """One entry of a stream that is to be sent."""

    stream: TokenStream
    number: int
    pieces: list[tuple[int, Piece]]
    entries_max: int

    def write(self) -> TokenEntry:
        """Write it as JSON. Raises ValueError for text that is no text."""
        return TokenEntry(
            self.stream.completion_id, self.number, self.stream.write(self.pieces), self.entries_max
        )


Trouble = tuple[Parcel, Failure]


class TokenSender:
    """Sends the tokens of all streams of this worker."""

    def __init__(self, line: Line, in_thread: InThread) -> None:
        """Prepare on the event loop; `run` sends until it is cancelled."""
        self._line = line
        self._in_thread = in_thread
        self._wake = asyncio.Event()
        self._open: dict[UUID, TokenStream] = {}

    def open(
        self, claimed: ClaimedCompletion, failed: Failed, write: WritePieces = pieces_bytes
    ) -> TokenStream:
        """Begin the stream of a Completion; `failed` is called when it cannot go on.

        `write` writes its pieces, in their order.
        """
        samplings = [spec.sampling for spec in claimed.specs]
        tokens_max = sum(sampling.n * sampling.max_tokens for sampling in samplings)
        stream = TokenStream(
            claimed.id,
            tokens_max + SPARE_ENTRIES,
            wake=self._wake.set,
            failed=failed,
            write=write,
        )
        self._open[claimed.id] = stream
        return stream

    def close(self, stream: TokenStream) -> None:
        """End a stream; what it has not sent is dropped."""
        self._open.pop(stream.completion_id, None)

    async def run(self) -> None:
        """Send what comes, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            parcels = [p for s in list(self._open.values()) if (p := s.take()) is not None]
            if not parcels:
                continue
            try:
                troubles = dict(await self._in_thread(partial(self._send, parcels)))
            except Exception:
                # Without this task, every stream from now on would wait for its end in vain.
                log.exception("sending tokens failed")
                troubles = dict.fromkeys(parcels, NO_BROKER)
            for parcel in parcels:
                parcel.stream.settle(troubles.get(parcel))
            await asyncio.sleep(PAUSE_SECONDS)

    def _send(self, parcels: list[Parcel]) -> list[Trouble]:
        """Send parcels and list those that were not; blocking."""
        troubles: list[Trouble] = []
        entries = []
        for parcel in parcels:
            try:
                entries.append(parcel.write())
            except ValueError as error:
                troubles.append((parcel, Failure("engine_error", str(error))))
            except Exception:
                # Whatever is wrong with one stream, the others go on.
                log.exception("a stream's pieces could not be written")
                troubles.append((parcel, UNWRITTEN))
        try:
            self._line.put_tokens(entries)
        except BROKER_ERRORS as error:
            log.warning("tokens not sent", extra={"error": repr(error)})
            return [(parcel, NO_BROKER) for parcel in parcels]
        return troubles
