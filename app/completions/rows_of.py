"""Reads `from` of a replace: which captured rows of which finished request are to be written.

Only what was sent is read here. Whether the account has the request, and whether it captured
these rows, is looked up at intake; equal references are equal objects, so that it is looked up
once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from app.completions.problems import RefusedError, first_twin, is_int, shown, unknown_field
from app.kit.ids import parse_id
from app.steering.spec import Site

FIELDS: Final = frozenset({"job", "request_index", "custom_id", "layer", "site", "positions"})
ROWS_MAX: Final = 4096
_WHOLE_MAX: Final = 2**31 - 1  # layers, positions and indices are 32-bit everywhere


@dataclass(frozen=True, slots=True)
class RowsOf:
    """Captured rows of one request: one for each of `positions`, in their order.

    The request is named by exactly one of `request_index` and `custom_id`.
    """

    job_id: UUID
    request_index: int | None
    custom_id: str | None
    layer: int
    site: Site
    positions: tuple[int, ...]

    @property
    def request(self) -> int | str:
        """The name of the request, whichever of the two it is."""
        name = self.custom_id if self.request_index is None else self.request_index
        assert name is not None
        return name


def read_rows_of(
    sent: Any, at_positions: tuple[int, ...] | None, *, custom_id_chars: int
) -> RowsOf:
    """Read the `from` of a replace; without positions of its own it takes those of `at`.

    Raises RefusedError with the rest of a sentence that starts with the name of the field, for
    example "has no job; name the Job whose rows to take".
    """
    if not isinstance(sent, dict):
        msg = f"must be an object with {', '.join(sorted(FIELDS))}, not {shown(sent)}"
        raise RefusedError(msg)
    for name in sent:
        if name not in FIELDS:
            raise RefusedError("is wrong: " + unknown_field(name, FIELDS, of="from"))
    job_id = _job_id(sent.get("job"))
    request_index, custom_id = _request(
        sent.get("request_index"), sent.get("custom_id"), custom_id_chars
    )
    layer: Any = sent.get("layer")
    if not is_int(layer) or not 0 <= layer <= _WHOLE_MAX:
        msg = f"has the layer {shown(layer)}; it must be the number of a captured layer, from 0"
        raise RefusedError(msg)
    site = sent.get("site")
    if site is not None and (not isinstance(site, str) or site not in set(Site)):
        msg = f"has the site {shown(site)}; it must be one of {', '.join(Site)}"
        raise RefusedError(msg)
    positions = sent.get("positions")
    if positions is None:
        if at_positions is None:
            msg = "has no positions, and at has none either; name the positions whose rows to take"
            raise RefusedError(msg)
        chosen = at_positions
    else:
        chosen = read_positions(positions)
    site = Site.resid_post if site is None else Site(site)
    return RowsOf(job_id, request_index, custom_id, layer, site, chosen)


def read_positions(sent: Any, *, of: str = "positions") -> tuple[int, ...]:
    """Read a list of 1 to 4096 distinct positions, the field `of`, keeping its order.

    Raises RefusedError.
    """
    if not isinstance(sent, list) or not all(map(is_int, sent)):
        msg = f"has {of} {shown(sent)}; it must be a list of whole numbers, from 0"
        raise RefusedError(msg)
    if not sent:
        msg = f"has an empty list {of}; name at least one position, or leave {of} out"
        raise RefusedError(msg)
    if len(sent) > ROWS_MAX:
        msg = f"has {len(sent)} positions in {of}; at most {ROWS_MAX} are allowed"
        raise RefusedError(msg)
    refuse_negative(sent)
    twice = first_twin(sent)
    if twice is not None:
        msg = f"names position {twice} more than once in {of}"
        raise RefusedError(msg)
    return tuple(sent)


def refuse_negative(positions: Iterable[int]) -> None:
    """Raise RefusedError when a position is negative or past every model's context."""
    for position in positions:
        if position < 0:
            msg = (
                f"names position {position}; positions are counted from 0, the first prompt token. "
                'For the position that is predicted from use {"phase": "last"}'
            )
            raise RefusedError(msg)
        if position >= _WHOLE_MAX:
            msg = f"names position {position}, which no model reaches"
            raise RefusedError(msg)


def _job_id(sent: Any) -> UUID:
    if sent is None:
        msg = "has no job; name the Job whose rows to take"
        raise RefusedError(msg)
    job_id = parse_id("job", sent) if isinstance(sent, str) else None
    if job_id is None:
        msg = f'has the job {shown(sent)}; the id of a Job is "job_" and 32 hexadecimal digits'
        raise RefusedError(msg)
    return job_id


def _request(index: Any, custom_id: Any, chars_max: int) -> tuple[int | None, str | None]:
    if (index is None) == (custom_id is None):
        has = "neither request_index nor" if index is None else "both request_index and"
        msg = f"has {has} custom_id; name the request by one of them"
        raise RefusedError(msg)
    if index is not None and (not is_int(index) or not 0 <= index <= _WHOLE_MAX):
        msg = f"has the request_index {shown(index)}; it must be a whole number, from 0"
        raise RefusedError(msg)
    if custom_id is not None and not (
        isinstance(custom_id, str) and 0 < len(custom_id) <= chars_max and custom_id.isprintable()
    ):
        msg = (
            f"has the custom_id {shown(custom_id)}; it must be a string of 1 to {chars_max} "
            "printable characters"
        )
        raise RefusedError(msg)
    return index, custom_id
