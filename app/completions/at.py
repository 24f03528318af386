"""Reads `at`, which says at which positions an intervention acts or a capture reads.

Reading needs no prompt; resolving needs it, because phases, steps and special tokens are places
in a prompt. A chosen set is cut by `steps` and `exclude`:

    positions | spans | phase (default all)   and   steps   and not   exclude
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from app.completions import spans as sets
from app.completions.problems import RefusedError, is_int, shown, unknown_field
from app.completions.rows_of import ROWS_MAX, read_positions, refuse_negative
from app.steering.spec import FOREVER, Spans

FIELDS: Final = frozenset({"positions", "spans", "phase", "steps", "exclude"})
CHOICES: Final = ("positions", "spans", "phase")
SPECIAL_TOKENS: Final = "special_tokens"


class Phase(StrEnum):
    """Named sets of positions; P is the number of prompt tokens."""

    prompt = "prompt"  # p < P
    generated = "generated"  # p >= P
    all = "all"
    last = "last"  # p >= P - 1: what is predicted from, in every pass


@dataclass(frozen=True)
class At:
    """What was sent, checked. At most one of `positions`, `spans` and `phase` is not the default.

    `positions` are distinct and keep their order. `steps` is half-open; step 0 is the prompt
    pass, step k runs position P + k - 1.
    """

    positions: tuple[int, ...] | None = None
    spans: Spans | None = None
    phase: Phase = Phase.all
    steps: tuple[int, int] | None = None
    exclude: Spans = ()
    exclude_special: bool = False

    @property
    def is_everywhere(self) -> bool:
        """Whether it means every position, whatever the prompt is."""
        return self == EVERYWHERE

    @cached_property
    def last_named(self) -> int:
        """The last position that was named, to act at or to leave out; -1 when none was."""
        positions = (*(self.positions or ()), *(end - 1 for _, end in self.spans or ()))
        return max((*positions, *(end - 1 for _, end in self.exclude)), default=-1)

    @cached_property
    def unphased(self) -> Spans:
        """The set as far as it does not depend on a prompt: neither phase nor steps cut it."""
        chosen = sets.EVERYWHERE
        if self.positions is not None:
            chosen = sets.of_positions(self.positions)
        elif self.spans is not None:
            chosen = self.spans
        return sets.subtract(chosen, self.exclude)

    @property
    def copies(self) -> int:
        """How many positions a single vector is copied to, as far as they were named; else 1."""
        if self.positions is not None:
            return len(self.positions)
        return 1 if self.spans is None else sets.count(self.spans)


EVERYWHERE: Final = At()


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the passes of a request go: its prompt, max_tokens, and the model's context."""

    prompt_tokens: int
    max_tokens: int
    context: int

    @property
    def last(self) -> int:
        """The last position that a pass can run; the last generated token never runs."""
        return min(self.prompt_tokens + self.max_tokens, self.context) - 2


def read_at(sent: Any, *, positions_max: int | None) -> At:
    """Read an `at`; spans may cover `positions_max` positions (None: any number).

    Raises RefusedError with the rest of a sentence that starts with the name of the field.
    """
    if sent is None:
        return EVERYWHERE
    if not isinstance(sent, dict):
        msg = f"must be an object with {', '.join(sorted(FIELDS))}, not {shown(sent)}"
        raise RefusedError(msg)
    for name in sent:
        if name not in FIELDS:
            raise RefusedError("is wrong: " + unknown_field(name, FIELDS, of="at"))
    fields = {name: value for name, value in sent.items() if value is not None}
    if not fields:
        msg = "says nothing; name positions, spans, phase, steps or exclude, or leave at out"
        raise RefusedError(msg)
    chosen = [name for name in CHOICES if name in fields]
    if len(chosen) > 1:
        msg = f"has both {chosen[0]} and {chosen[1]}; send one of {', '.join(CHOICES)}"
        raise RefusedError(msg)
    exclude, exclude_special = _exclude(fields.get("exclude"))
    return At(
        positions=read_positions(fields["positions"]) if "positions" in fields else None,
        spans=_spans(fields["spans"], positions_max) if "spans" in fields else None,
        phase=_phase(fields["phase"]) if "phase" in fields else Phase.all,
        steps=_steps(fields["steps"]) if "steps" in fields else None,
        exclude=exclude,
        exclude_special=exclude_special,
    )


def resolve(
    at: At, prompt_tokens: int, token_ids: Collection[int], special_ids: Collection[int]
) -> Spans | None:
    """Give the positions that an `at` means for a prompt; None for all of them.

    `token_ids` is the prompt. The positions may lie past the request's end; there may be none.
    """
    special = find_special(token_ids, special_ids) if at.exclude_special else ()
    return resolve_beside(at, prompt_tokens, special)


def find_special(token_ids: Collection[int], special_ids: Collection[int]) -> tuple[int, ...]:
    """List the positions of a prompt's special tokens."""
    return tuple(place for place, token in enumerate(token_ids) if token in special_ids)


def resolve_beside(at: At, prompt_tokens: int, special: Collection[int]) -> Spans | None:
    """Resolve as `resolve` does, with the positions of special tokens already found."""
    chosen = at.unphased
    phases: dict[Phase, Spans] = {
        Phase.prompt: ((0, prompt_tokens),),
        Phase.generated: ((prompt_tokens, FOREVER),),
        Phase.last: ((prompt_tokens - 1, FOREVER),),
    }
    if at.phase is not Phase.all:
        chosen = sets.intersect(chosen, phases[at.phase])
    if at.steps is not None:
        first, end = at.steps
        start = 0 if first == 0 else prompt_tokens + first - 1
        chosen = sets.intersect(chosen, ((start, prompt_tokens + end - 1),))
    if at.exclude_special and special:
        chosen = sets.subtract(chosen, sets.of_positions(special))
    return None if chosen == sets.EVERYWHERE else chosen


def check_reach(at: At, reach: Reach) -> None:
    """Raise RefusedError when a position or step is named that no forward pass reaches."""
    last = at.last_named
    if last > reach.last:
        msg = (
            f"names position {last}, but this request reaches positions 0 to {reach.last}: its "
            f"prompt has {reach.prompt_tokens} tokens, max_tokens is {reach.max_tokens}, and the "
            f"last generated token never runs through the model. Name positions up to {reach.last}"
        )
        longer = last < reach.context - 1
        raise RefusedError(msg + (", or raise max_tokens" if longer else ""))
    steps_end = reach.last - reach.prompt_tokens + 2
    if at.steps is not None and at.steps[1] > steps_end:
        msg = (
            f"has steps {list(at.steps)}, but this request runs steps 0 to {steps_end - 1}, that "
            f"is [0, {steps_end}]: max_tokens is {reach.max_tokens}, and the last generated token "
            f"never runs through the model. End steps at {steps_end} or before, or raise max_tokens"
        )
        raise RefusedError(msg)


def refuse_empty(at: At, found: Spans | None, reach: Reach) -> None:
    """Raise RefusedError when `found`, what `at` resolved to, holds no position that runs.

    The phase "generated" of a request with max_tokens 1 is taken: it simply never runs.
    """
    if found is None or sets.intersect(found, ((0, reach.last + 1),)):
        return
    if found and at.phase is Phase.generated and reach.max_tokens == 1:
        return
    msg = (
        f"leaves no position: after steps and exclude nothing is left of the positions 0 to "
        f"{reach.last} that this request reaches (its prompt has {reach.prompt_tokens} tokens). "
        "Exclude less, or choose other positions"
    )
    raise RefusedError(msg)


def _phase(sent: Any) -> Phase:
    if not isinstance(sent, str) or sent not in set(Phase):
        msg = f"has the phase {shown(sent)}; it must be one of {', '.join(Phase)}"
        raise RefusedError(msg)
    return Phase(sent)


def _spans(sent: Any, positions_max: int | None) -> Spans:
    if not isinstance(sent, list) or not sent or not all(map(_is_pair, sent)):
        msg = f"has spans {shown(sent)}; it must be a list of at least one [start, end] pair"
        raise RefusedError(msg)
    if len(sent) > ROWS_MAX:
        msg = f"has {len(sent)} spans; at most {ROWS_MAX} are allowed"
        raise RefusedError(msg)
    for start, end in sent:
        if end <= start:
            msg = f"has the span [{start}, {end}], which does not end after it starts"
            raise RefusedError(msg)
    for (_, end), (after, _) in pairwise(sorted(sent)):
        if after < end:
            msg = f"has spans that overlap at position {after}"
            raise RefusedError(msg)
    covered = sum(end - start for start, end in sent)
    if positions_max is not None and covered > positions_max:
        msg = f"has spans of {covered} positions in all; at most {positions_max} are allowed"
        raise RefusedError(msg)
    refuse_negative(edge for start, end in sent for edge in (start, end - 1))
    return sets.of_ranges((start, end) for start, end in sent)


def _steps(sent: Any) -> tuple[int, int]:
    if not _is_pair(sent):
        msg = f"has steps {shown(sent)}; it must be one [start, end] pair, start included"
        raise RefusedError(msg)
    start, end = sent
    if start < 0:
        msg = f"has steps {shown(sent)}; steps are counted from 0, which is the prompt pass"
        raise RefusedError(msg)
    if end <= start:
        msg = f"has steps {shown(sent)}, which do not end after they start"
        raise RefusedError(msg)
    return start, end


def _exclude(sent: Any) -> tuple[Spans, bool]:
    if sent is None:
        return (), False
    if sent == SPECIAL_TOKENS:
        return (), True
    if not isinstance(sent, list):
        msg = f'has exclude {shown(sent)}; it must be a list of positions, or "{SPECIAL_TOKENS}"'
        raise RefusedError(msg)
    return sets.of_positions(read_positions(sent, of="exclude")), False


def _is_pair(sent: object) -> bool:
    return isinstance(sent, list) and len(sent) == 2 and all(map(is_int, sent))
