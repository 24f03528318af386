"""What it means that a page is followed: how it is read anew, and the pieces that are sent.

A page's own module makes its `Followed`, from the same context that it renders itself with; the
stream that sends the pieces is app/admin/live.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from app.admin.access import PATH
from app.errors import NotFoundError
from app.kit.db import Conn

Context = dict[str, Any]


def _never(_seen: Context) -> bool:
    return False


def _no_page() -> NotFoundError:
    return NotFoundError("There is nothing to follow here.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A page that is followed.

    `key` names what is read, so that streams of the same page share it; `read` gives the context
    of the templates, None when the thing is gone. `pieces` says which template each event carries.
    What was read is good for `fresh_seconds` at least.
    """

    key: str
    read: Callable[[Conn], Context | None]
    pieces: Mapping[str, str]
    is_over: Callable[[Context], bool] = _never
    missing: Callable[[], NotFoundError] = _no_page
    fresh_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Still:
    """Why a page is not followed: where the one is that is, and what it is called."""

    href: str
    words: str


FIRST_PAGE: Final = "its first page is live"
JOB_PAGE: Final = "the page of its Job is live"
NOT_FOLLOWED: Final[Context] = {"live": None, "still": None}


def live_at(page: str, **named: str) -> Context:
    """Give the context of a page that is followed: the address of its stream."""
    return {"live": f"{PATH}/live?{urlencode({'page': page, **named})}", "still": None}


def stands_still(href: str, words: str = FIRST_PAGE) -> Context:
    """Give the context of a page that is not followed; at `href` is one that is."""
    return {"live": None, "still": Still(href, words)}
