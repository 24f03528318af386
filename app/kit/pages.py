"""Pages of lists: what may be asked for, and the one shape that all of them have.

Pages follow a key (`after` = id of the last item seen), never an offset, so that a page costs the
same wherever it lies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.errors import InvalidRequestError

LIMIT_DEFAULT = 20
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which page: at most `limit` items behind the item `after`, in `order`."""

    limit: int
    after: str | None
    order: Order


def page_query(query: Mapping[str, str], *, limit_max: int, newest: bool = True) -> PageQuery:
    """Read limit, after and order of a list. Raises InvalidRequestError naming the wrong one."""
    limit, order = query.get("limit"), query.get("order")
    default: Order = "desc" if newest else "asc"
    if order not in (None, "asc", "desc"):
        msg = f"order must be asc or desc, not {order[:50]!r}."
        raise InvalidRequestError(msg, param="order")
    count = LIMIT_DEFAULT if limit is None else whole_number("limit", limit, 1, limit_max)
    return PageQuery(count, query.get("after"), order or default)  # type: ignore[arg-type]


def whole_number(name: str, text: str, least: int, most: int) -> int:
    """Read a query parameter that is a whole number. Raises InvalidRequestError."""
    if text.isascii() and text.isdecimal() and len(text) < 19 and least <= int(text) <= most:
        return int(text)
    msg = f"{name} must be a whole number from {least} to {most}, not {text[:50]!r}."
    raise InvalidRequestError(msg, param=name)


def unknown_cursor(after: str) -> InvalidRequestError:
    """Make the error for an `after` that is not the id of an item of this list."""
    msg = f"after must be the id of an item of this list, not {after[:80]!r}."
    return InvalidRequestError(msg, param="after")


def list_page(items: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Write a page; every item has an `id`."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
