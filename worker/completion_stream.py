"""Tokens of streamed Completions on their way into Redis.

    engine -> give (on the event loop) -> pending -> one round trip for all streams -> Redis

While one round trip runs, what comes next is gathered; so a step of the engine costs one at most,
whatever the number of streams. Redis holds little that nobody has read yet, of a stream as of an
account; the rest of what a slow client is to get waits here, for as long as its Completion allows.
A stream that Redis does not take has failed, and its Completion with it; the others go on. Nothing
here decides an end: rows in Postgres do.
"""

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from uuid import UUID

from redis.exceptions import RedisError

from app.completions.line import BROKER_ERRORS, Line, TokenEntry
from app.completions.records import ClaimedCompletion, Failure
from worker.completion_answer import pieces_bytes
from worker.engine.protocol import Piece

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.02  # between two round trips: nobody reads faster
LOOK_SECONDS = 0.05  # between two looks whether streams that must wait have been read
SPARE_ENTRIES = 16
ENTRY_BYTES = 256 * 1024  # about; a single piece with a prompt's logprobs may have 40 MiB
STREAM_BYTES = 1024**2  # in Redis and not read yet: then a stream waits
# Of all streams of one account that this worker runs: Redis has 512 MiB for everybody.
ACCOUNT_BYTES = 32 * 1024**2
LINGER_BYTES = 64 * 1024  # of a stream that has ended: what is less is not looked after
UNWRITTEN = Failure("engine_error", "The worker could not write this answer.")
NO_BROKER = Failure("broker_unavailable", "The answer could not be sent back. Send it again.")

Failed = Callable[[], None]
WritePieces = Callable[[Sequence[tuple[int, Piece]]], bytes]


@dataclass(frozen=True, slots=True)
class Taken:
    """An entry that is in Redis: its bytes, and how many its stream holds with it."""

    size: int
    held: int


@dataclass(frozen=True, slots=True)
class Round:
    """What became of parcels, and how many entries the streams hold that were looked at."""

    results: "Mapping[Parcel, Taken | Failure]"
    held: "Mapping[TokenStream, int | Failure]"


class InThread(Protocol):
    """Runs blocking work to its end off the event loop."""

    def __call__(self, work: Callable[[], Round]) -> Awaitable[Round]:
        """Give what the work gave."""


class TokenStream:
    """The tokens of one Completion; `generated` counts them as the engine made them."""

    def __init__(
        self,
        claimed: ClaimedCompletion,
        *,
        wake: Callable[[], None],
        failed: Failed,
        write: WritePieces,
    ) -> None:
        """Call `wake` when there is something to send, and `failed` once nothing can be sent."""
        self.completion_id = claimed.id
        self.account_id = claimed.account_id
        self.write = write
        self.generated = 0
        self.failure: Failure | None = None
        samplings = [spec.sampling for spec in claimed.specs]
        self._entries_max = SPARE_ENTRIES + sum(each.n * each.max_tokens for each in samplings)
        self._wake = wake
        self._failed = failed
        self._pending: deque[tuple[int, Piece]] = deque()
        self._unread: deque[int] = deque()  # bytes of the entries that Redis holds
        self._number = 0
        self.unread_bytes = 0
        self._room_by = math.inf  # on the loop's clock
        self._was_dropped = False
        self._is_sent = asyncio.Event()
        self._is_sent.set()

    @property
    def has_more(self) -> bool:
        """Tell whether something waits to be sent."""
        return bool(self._pending) and self.failure is None

    def give(self, place: int, piece: Piece) -> None:
        """Take a piece of the prompt at `place`; on the event loop."""
        self.generated += len(piece.token_ids)
        self._pending.append((place, piece))
        self._is_sent.clear()
        self._wake()

    async def sent(self, seconds: float | None = None) -> bool:
        """Wait until all that was given is in Redis, or the stream has failed.

        False when what its client left no room for was dropped after `seconds`.
        """
        if seconds is not None:
            self._room_by = asyncio.get_running_loop().time() + seconds
        await self._is_sent.wait()
        return not self._was_dropped

    def find_no_room(self, now: float) -> None:
        """Wait on until its client has read, or drop the rest when that comes too late."""
        if now >= self._room_by:
            self._was_dropped = True
            self._pending.clear()
            self._is_sent.set()

    def take(self) -> "Parcel":
        """Take out what waits, as one entry; of much, the first part."""
        pieces: list[tuple[int, Piece]] = []
        weight = 0
        while self._pending and (not pieces or weight < ENTRY_BYTES):
            pieces.append(self._pending.popleft())
            weight += weight_of(pieces[-1][1])
        self._number += 1
        return Parcel(self, self._number - 1, pieces, self._entries_max, weight)

    def settle(self, result: Taken | Failure) -> None:
        """Note that what was taken is in Redis, or why it is not."""
        if isinstance(result, Failure):
            self.fail(result)
        else:
            self._unread.append(result.size)
            self.unread_bytes += result.size
            self.note_held(result.held)
        if self.failure is not None or not self._pending:
            self._is_sent.set()

    def note_held(self, entries: int) -> None:
        """Note how many entries Redis holds: all before them were read."""
        while len(self._unread) > entries:
            self.unread_bytes -= self._unread.popleft()

    def fail(self, failure: Failure) -> None:
        """Send nothing any more."""
        if self.failure is None:
            self.failure = failure
            self._failed()
        self._is_sent.set()


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """One entry of a stream that is to be sent, of about `weight` bytes."""

    stream: TokenStream
    number: int
    pieces: list[tuple[int, Piece]]
    entries_max: int
    weight: int

    def write(self) -> TokenEntry:
        """Write it as JSON. Raises ValueError for text that is no text."""
        return TokenEntry(
            self.stream.completion_id, self.number, self.stream.write(self.pieces), self.entries_max
        )


class TokenSender:
    """Sends the tokens of all streams of this worker."""

    def __init__(self, line: Line, in_thread: InThread) -> None:
        """Prepare on the event loop; `run` sends until it is cancelled."""
        self._line = line
        self._in_thread = in_thread
        self._wake = asyncio.Event()
        self._open: dict[UUID, TokenStream] = {}
        self._lingering: set[TokenStream] = set()  # ended, and much of it is not read yet

    def open(
        self, claimed: ClaimedCompletion, failed: Failed, write: WritePieces = pieces_bytes
    ) -> TokenStream:
        """Begin the stream of a Completion; `failed` is called when it cannot go on.

        `write` writes its pieces, in their order.
        """
        stream = TokenStream(claimed, wake=self._wake.set, failed=failed, write=write)
        self._open[claimed.id] = stream
        return stream

    def close(self, stream: TokenStream) -> None:
        """End a stream; what it has not sent is dropped."""
        self._open.pop(stream.completion_id, None)
        if stream.unread_bytes > LINGER_BYTES:
            self._lingering.add(stream)

    async def run(self) -> None:
        """Send what comes, until cancelled."""
        while True:
            await self._wait()
            parcels, blocked = self._gather()
            if not parcels and not blocked:
                continue
            looked_at = self._to_look_at(blocked)
            try:
                done = await self._in_thread(partial(self._send, parcels, looked_at))
            except Exception:
                # Without this task, every stream from now on would wait for its end in vain.
                log.exception("sending tokens failed")
                done = Round(dict.fromkeys(parcels, NO_BROKER), dict.fromkeys(looked_at, NO_BROKER))
            for stream, held in done.held.items():
                self._note(stream, held)
            for parcel, result in done.results.items():
                parcel.stream.settle(result)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _wait(self) -> None:
        """Wait for something to send; not for long while something must wait to be read."""
        must_wait = any(stream.has_more for stream in self._open.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS if must_wait else None):
                await self._wake.wait()
        self._wake.clear()

    def _to_look_at(self, blocked: Collection[UUID]) -> list[TokenStream]:
        """List the streams that hold blocked accounts up, however little of each is unread."""
        held_up = [
            stream
            for stream in self._open.values()
            if stream.unread_bytes > 0 and stream.account_id in blocked
        ]
        return [*held_up, *self._lingering]

    def _gather(self) -> tuple[list[Parcel], set[UUID]]:
        """Take what may be sent; name the accounts that must wait until more has been read."""
        unread: Counter[UUID] = Counter()
        for stream in (*self._open.values(), *self._lingering):
            unread[stream.account_id] += stream.unread_bytes
        parcels: list[Parcel] = []
        blocked: set[UUID] = set()
        now = asyncio.get_running_loop().time()
        waiting = [stream for stream in self._open.values() if stream.has_more]
        # Who has least in Redis goes first: one that is not read must not hold its account up.
        for stream in sorted(waiting, key=lambda each: each.unread_bytes):
            account = stream.account_id
            if stream.unread_bytes >= STREAM_BYTES or unread[account] >= ACCOUNT_BYTES:
                blocked.add(account)
                stream.find_no_room(now)
                continue
            parcel = stream.take()
            parcels.append(parcel)
            unread[account] += parcel.weight
            if stream.has_more:
                self._wake.set()
        return parcels, blocked

    def _note(self, stream: TokenStream, held: int | Failure) -> None:
        if isinstance(held, Failure):
            stream.fail(held)
        else:
            stream.note_held(held)
        if stream.unread_bytes <= LINGER_BYTES or stream.failure is not None:
            self._lingering.discard(stream)

    def _send(self, parcels: list[Parcel], looked_at: list[TokenStream]) -> Round:
        """Send parcels and look how much of other streams was read; blocking."""
        results: dict[Parcel, Taken | Failure] = {}
        written: list[tuple[Parcel, TokenEntry]] = []
        for parcel in parcels:
            try:
                written.append((parcel, parcel.write()))
            except ValueError as error:
                results[parcel] = Failure("engine_error", str(error))
            except Exception:
                # Whatever is wrong with one stream, the others go on.
                log.exception("a stream's pieces could not be written")
                results[parcel] = UNWRITTEN
        held: dict[TokenStream, int | Failure] = {}
        try:
            for (parcel, entry), taken in zip(
                written, self._line.put_tokens([entry for _, entry in written]), strict=True
            ):
                results[parcel] = _result(entry, taken)
            ids = [stream.completion_id for stream in looked_at]
            held |= zip(looked_at, self._line.count_entries(ids), strict=True)
        except BROKER_ERRORS as error:
            log.warning("tokens not sent", extra={"error": repr(error)})
            results = {parcel: results.get(parcel, NO_BROKER) for parcel in parcels}
            held = dict.fromkeys(looked_at, NO_BROKER)
        return Round(results, held)


def weight_of(piece: Piece) -> int:
    """Estimate the bytes of a piece as JSON."""
    listed = [*(piece.top_logprobs or ()), *(piece.prompt_logprobs or ())]
    alternatives = sum(len(token) for token in listed if token)
    return 150 + len(piece.text) + 12 * len(piece.token_ids) + 40 * alternatives


def _result(entry: TokenEntry, taken: int | RedisError) -> Taken | Failure:
    if isinstance(taken, int):
        return Taken(len(entry.pieces), taken)
    log.warning("a stream's tokens not sent", extra={"error": repr(taken)})
    return NO_BROKER
