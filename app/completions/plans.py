"""What is the same for every prompt, and what a prompt makes of it.

A plan is made once for a list that many requests share. Its positions are resolved for each
prompt, and prompts that give the same positions share the outcome.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, Final, Generic, TypeVar

from app.completions import spans as sets
from app.completions.at import At, Reach, check_reach, find_special, refuse_empty, resolve_beside
from app.completions.problems import RefusedError, sentence
from app.steering.spec import Capture, Intervention, Spans

T = TypeVar("T")
_REMEMBERED_MAX: Final = 16_384  # interventions or captures in the outcomes that a plan remembers


@dataclass(frozen=True, slots=True)
class Prompted:
    """The prompt of a request and how far it goes."""

    token_ids: tuple[int, ...]
    special_ids: Collection[int]
    reach: Reach

    def special_positions(self) -> tuple[int, ...]:
        """List where the prompt has special tokens."""
        return find_special(self.token_ids, self.special_ids)


class Plan(ABC, Generic[T]):
    """A checked list that waits for prompts."""

    def __init__(self, ats: Collection[At]) -> None:
        """Note whether the prompt matters at all."""
        self._is_everywhere = all(at.is_everywhere for at in ats)
        self._excludes_special = any(at.exclude_special for at in ats)
        self._always: tuple[T, ...] | None = None
        self._known: dict[Any, tuple[T, ...] | RefusedError] = {}
        self._remembered = 0

    def place(self, prompted: Prompted) -> tuple[T, ...]:
        """Resolve all positions. Raises RefusedError for those that are not reached, or none."""
        if self._is_everywhere:
            if self._always is None:
                self._always = self._place(prompted.reach, ())
            return self._always
        special = prompted.special_positions() if self._excludes_special else ()
        key = (prompted.reach, special)
        outcome = self._known.get(key)
        if outcome is None:
            if self._remembered >= _REMEMBERED_MAX:
                self._known.clear()
                self._remembered = 0
            try:
                outcome = self._place(prompted.reach, special)
                self._remembered += len(outcome)
            except RefusedError as refusal:
                outcome = refusal
                self._remembered += 1
            self._known[key] = outcome
        if isinstance(outcome, RefusedError):
            raise RefusedError(*outcome.args)
        return outcome

    @abstractmethod
    def _place(self, reach: Reach, special: tuple[int, ...]) -> tuple[T, ...]:
        """Resolve for prompts of one length, with special tokens at these positions."""


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """One op of a list: an intervention for each of its layers, still without positions.

    With `by_position`, position k of `at` takes row + k.
    """

    name: str  # "interventions[2]", how messages name it
    at: At
    bare: tuple[Intervention, ...]
    by_position: bool = False

    def place(self, reach: Reach, special: tuple[int, ...]) -> Iterator[Intervention]:
        """Give the interventions with their positions; exclusions may part one into several."""
        found = _place(self.name, self.at, reach, special)
        if not self.by_position:
            yield from (replace(item, spans=found) for item in self.bare)
            return
        positions = self.at.positions or ()
        inside = sets.intersect(sets.of_positions(positions), found or sets.EVERYWHERE)
        kept = {position for start, end in inside for position in range(start, end)}
        runs = [
            [place for place, _ in group]
            for is_kept, group in groupby(enumerate(positions), key=lambda pair: pair[1] in kept)
            if is_kept
        ]
        for run in runs:
            stretch = positions[run[0] : run[-1] + 1]
            for item in self.bare:
                yield replace(item, row=item.row + run[0], positions=stretch)


class OpPlan(Plan[Intervention]):
    """The interventions of a list, in its order; `numbers` counts those that it holds."""

    def __init__(
        self, ops: tuple[PlannedOp, ...], *, numbers: int, pieces_max: int, stretches_max: int
    ) -> None:
        """Bind the ops.

        A request may have `pieces_max` interventions once they are placed, and `stretches_max`
        spans and single positions in all of them.
        """
        super().__init__([op.at for op in ops])
        self.numbers = numbers
        self._ops = ops
        self._pieces_max = pieces_max
        self._stretches_max = stretches_max

    def _place(self, reach: Reach, special: tuple[int, ...]) -> tuple[Intervention, ...]:
        placed: list[Intervention] = []
        for op in self._ops:
            placed += islice(op.place(reach, special), self._pieces_max + 1 - len(placed))
            if len(placed) > self._pieces_max:
                msg = (
                    f"{op.name} makes more than {self._pieces_max} interventions in all, one a "
                    "layer and one for each stretch between excluded positions. Leave the "
                    "excluded positions out of positions and of the rows, or name fewer layers."
                )
                raise RefusedError(msg)
        stretches = sum(len(item.positions or item.spans or (None,)) for item in placed)
        if stretches > self._stretches_max:
            msg = (
                f"interventions act on {stretches} stretches of positions, those of each layer "
                f"counted; at most {self._stretches_max} are allowed. Join spans, or name fewer "
                "layers."
            )
            raise RefusedError(msg)
        return tuple(placed)


@dataclass(frozen=True, slots=True)
class PlannedCapture:
    """A capture still without positions."""

    name: str  # "captures[0]"
    at: At
    bare: Capture


class CapturePlan(Plan[Capture]):
    """The captures of a request."""

    def __init__(self, captures: tuple[PlannedCapture, ...]) -> None:
        """Bind the captures."""
        super().__init__([capture.at for capture in captures])
        self._captures = captures

    def _place(self, reach: Reach, special: tuple[int, ...]) -> tuple[Capture, ...]:
        return tuple(
            item.bare
            if (found := _place(item.name, item.at, reach, special)) is None
            else replace(item.bare, spans=found)
            for item in self._captures
        )


def _place(name: str, at: At, reach: Reach, special: tuple[int, ...]) -> Spans | None:
    if at.is_everywhere:
        return None
    try:
        check_reach(at, reach)
        found = resolve_beside(at, reach.prompt_tokens, special)
        refuse_empty(at, found, reach)
    except RefusedError as refusal:
        raise RefusedError(sentence(f"{name}.at {refusal}")) from None
    return found
