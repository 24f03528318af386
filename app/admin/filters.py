"""How the dashboard writes numbers, times, sizes and ids: filters of the templates.

Every number carries its unit or stands under a heading that names it. Times are shown relative to
now; the exact moment travels beside them in a `<time>` element (macros.html).
"""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from app.kit.ids import Kind, public_id

ABSENT: Final = "\u2013"
MINUS: Final = "\u2212"
_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_LARGE: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def count(number: float | None) -> str:
    """Write a whole number with thousands separated."""
    return ABSENT if number is None else f"{round(number):,}".replace("-", MINUS)


def compact(number: float | None) -> str:
    """Write a large number short: 1,234 stays, 12,345 becomes 12.3 k."""
    if number is None:
        return ABSENT
    for least, letter in _LARGE:
        scale = 1e3 if letter == "k" else least
        # What would round to 1000 of the smaller unit is 1 of the larger one.
        if abs(number) >= (least if letter == "k" else least * 0.9995):
            return f"{_three_digits(number / scale)} {letter}".replace("-", MINUS)
    return count(number)


def rate(number: float | None) -> str:
    """Write how many a second, with a digit behind the point where that says something."""
    if number is None:
        return ABSENT
    if 0 < number < 0.05:
        return "< 0.1"
    return f"{number:.1f}" if 0 < number < 99.95 else compact(number)


def size(number: float | None) -> str:
    """Write bytes with the unit that fits."""
    if number is None:
        return ABSENT
    value, unit = float(number), 0
    while value >= 1023.5 and unit < len(_SIZES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_SIZES[unit]}" if unit == 0 else f"{_three_digits(value)} {_SIZES[unit]}"


def percent(part: float | None, whole: float | None = 1.0) -> str:
    """Write part / whole in percent; nothing is rounded up to 100 or down to 0."""
    if part is None or not whole:
        return ABSENT
    share = 100.0 * part / whole
    if 0 < share < 0.1:
        return "< 0.1 %"
    if 99.9 < share < 100:
        return "> 99.9 %"
    return f"{share:.0f} %" if share in (0.0, 100.0) else f"{share:.1f} %"


def duration(seconds: float | None) -> str:
    """Write a length of time in at most two units: 240 ms, 8.2 s, 3 min 20 s, 4 d 3 h."""
    if seconds is None:
        return ABSENT
    if seconds < 0:
        return "0 s"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if seconds < 3600:
        return _two(minutes, "min", int(seconds % 60), "s")
    if seconds < 86400:
        return _two(hours, "h", minutes % 60, "min")
    return _two(hours // 24, "d", hours % 24, "h")


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """Write a moment relative to now: "3 min ago", "in 2 h"."""
    if moment is None:
        return ABSENT
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    if abs(seconds) < 1:
        return "just now"
    largest = _largest_unit(abs(seconds))
    return f"{largest} ago" if seconds > 0 else f"in {largest}"


def exact(moment: datetime | None) -> str:
    """Write a moment in ISO 8601 to the millisecond, in UTC."""
    if moment is None:
        return ABSENT
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def named(value: UUID, kind: Kind) -> str:
    """Write a UUID as its public id, for example `job_0191…`."""
    return public_id(kind, value)


def short_id(text: str) -> str:
    """Shorten a public id to its kind and its two ends; the whole of it belongs into a title."""
    kind, _, digits = text.partition("_")
    return text if len(digits) <= 14 else f"{kind}_{digits[:8]}…{digits[-4:]}"


def pretty_json(value: Any) -> str:
    """Write JSON over several lines, keys in their order."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def plural(number: float, one: str, many: str | None = None) -> str:
    """Write a count with its noun: 1 Job, 2 Jobs."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def words(state: str) -> str:
    """Write the name of a state as words: in_progress becomes "in progress"."""
    return state.replace("_", " ")


def excerpt(text: str | None, length: int = 200) -> str:
    """Cut a text after `length` characters and say so with an ellipsis."""
    if text is None:
        return ABSENT
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


FILTERS: Final[Mapping[str, Callable[..., str]]] = {
    "count": count,
    "compact": compact,
    "rate": rate,
    "size": size,
    "percent": percent,
    "duration": duration,
    "ago": ago,
    "exact": exact,
    "named": named,
    "short_id": short_id,
    "pretty_json": pretty_json,
    "plural": plural,
    "words": words,
    "excerpt": excerpt,
}


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _two(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large} {large_unit}" if small == 0 else f"{large} {large_unit} {small} {small_unit}"


def _largest_unit(seconds: float) -> str:
    for least, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= least:
            return f"{int(seconds // least)} {unit}"
    return f"{int(seconds)} s"
