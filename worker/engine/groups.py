"""Who waits for whom before the scheduler: groups run whole, in order, with nothing beside them.

    hold -> forming (until every seat is taken or given up) -> in line -> inside -> gone

Sums in floating point depend on the shape of the batch, so a group's batches must depend on the
group alone. Requests without a seat pass straight on unless a group is inside or in line. No
vLLM here: the turnstile moves any objects, and its owner schedules those that it lets through.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

R = TypeVar("R")
SEAT_KEY = "seat"  # of what a request carries into the engine
URGENT_KEY = "urgent"  # likewise: it goes before those that wait
_NOTE = "tiller-gave-up"
# Bounds on what is remembered of groups that are over, or of which no request ever arrived.
_OVER_MAX = 256


class Seat(NamedTuple):
    """An engine request's place in its group: 0 to size - 1, in the order of the batch."""

    group: str
    size: int
    place: int


def seat_of(carried: Mapping[str, object] | None) -> Seat | None:
    """Read the seat from what a request carries; None when it is in no group."""
    seat = (carried or {}).get(SEAT_KEY)
    return Seat(*seat) if isinstance(seat, list | tuple) else None


def note_of(seat: Seat) -> str:
    """Write the note "this seat stays empty" as a request id: aborts are all that vLLM relays."""
    return f"{_NOTE}:{seat.size}:{seat.place}:{seat.group}"


def read_note(request_id: str) -> Seat | None:
    """Read a note; None for the id of a request."""
    if not request_id.startswith(_NOTE):
        return None
    _, size, place, group = request_id.split(":", 3)
    return Seat(group, int(size), int(place))


@dataclass(slots=True)
class _Forming(Generic[R]):
    """A group that is not complete yet: requests by place, and places that stay empty."""

    size: int
    present: dict[int, R] = field(default_factory=dict)
    empty: set[int] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        return len(self.present.keys() | self.empty) == self.size


@dataclass(slots=True)
class _Wave(Generic[R]):
    """Requests that go on together; those of a group wait until the engine is empty."""

    requests: list[R]
    alone: bool


class Turnstile(Generic[R]):
    """Holds requests back until they may be scheduled; each is held or let through once."""

    def __init__(self) -> None:
        """Start with nobody waiting."""
        self._forming: dict[str, _Forming[R]] = {}
        self._over: deque[str] = deque(maxlen=_OVER_MAX)
        self._line: deque[_Wave[R]] = deque()
        self._inside: set[R] = set()
        self._unwanted: set[R] = set()

    @property
    def in_use(self) -> bool:
        """True while any group is forming, in line or inside."""
        return bool(self._inside or self._line or self._forming)

    def hold(self, request: R, seat: Seat | None) -> bool:
        """Take a new request; True when it has to wait until `admit` gives it."""
        if seat is None:
            if not self._inside and not self._line:
                return False
            if not self._line or self._line[-1].alone:
                self._line.append(_Wave([], alone=False))
            self._line[-1].requests.append(request)
        elif seat.group in self._over:
            self._line.append(_Wave([request], alone=True))  # it was given up, and came later
        else:
            forming = self._form(seat)
            forming.present[seat.place] = request
            self._line_up(seat.group)
        return True

    def give_up(self, seat: Seat) -> None:
        """Leave a seat empty: its request was refused, or aborted on its way. Repeatable."""
        if seat.group in self._over:
            return
        forming = self._form(seat)
        if seat.place not in forming.present:
            forming.empty.add(seat.place)
            self._line_up(seat.group)

    def forget(self, request: R) -> None:
        """Let go of a request that has ended, wherever it waits."""
        self._inside.discard(request)
        self._unwanted.discard(request)
        for wave in self._line:
            if request in wave.requests:
                wave.requests.remove(request)
        for group, forming in list(self._forming.items()):
            for place, other in list(forming.present.items()):
                if other is request:
                    del forming.present[place]
                    forming.empty.add(place)
                    self._line_up(group)

    def keep_inside(self, request: R) -> bool:
        """Take an abort; True when the request must go on, because others share its batches.

        When an abort arrives depends on timing (that of a stop string, for one), so an aborted
        request runs on to its end, unless nobody wants any of its group: see `abandoned`.
        """
        if request not in self._inside:
            return False
        self._unwanted.add(request)
        return True

    def settle(self, has_ended: Callable[[R], bool]) -> None:
        """Let go of requests inside that have ended by themselves."""
        self._inside = {request for request in self._inside if not has_ended(request)}
        self._unwanted &= self._inside

    def abandoned(self) -> list[R]:
        """List what is left of the group inside, once all of it is unwanted."""
        return list(self._inside) if self._unwanted >= self._inside else []

    def admit(self, *, busy: bool) -> list[R]:
        """Let through what may be scheduled now, in order; `busy`: the engine is not empty."""
        admitted: list[R] = []
        while self._line and not self._inside:
            wave = self._line[0]
            if wave.alone and (busy or admitted):
                break
            self._line.popleft()
            if wave.alone:
                self._inside = set(wave.requests)
            admitted += wave.requests
        return admitted

    def _form(self, seat: Seat) -> _Forming[R]:
        if seat.group not in self._forming:
            dead = [key for key, forming in self._forming.items() if not forming.present]
            for key in dead[: len(dead) - _OVER_MAX]:
                del self._forming[key]
            self._forming[seat.group] = _Forming(seat.size)
        return self._forming[seat.group]

    def _line_up(self, group: str) -> None:
        forming = self._forming[group]
        if not forming.is_whole:
            return
        del self._forming[group]
        self._over.append(group)
        if forming.present:
            requests = [forming.present[place] for place in sorted(forming.present)]
            self._line.append(_Wave(requests, alone=True))
