"""Refuses what another site makes a browser send: checked before any route, cookie or not.

An unsafe method must come from a page of ours (Sec-Fetch-Site; Origin where a browser sends none).
A safe one changes nothing here; from another site it may only be a navigation of a whole window,
so that nothing of the dashboard can be embedded, fetched or timed from outside.
"""

from typing import Final

import httpx
from starlette.datastructures import Headers

from app.errors import PermissionDeniedError

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
CODE: Final = "cross_site_request"


def check_same_origin(method: str, headers: Headers) -> None:
    """Let a request pass that a page of this dashboard sent. Raises PermissionDeniedError."""
    site = headers.get("sec-fetch-site")
    if method in SAFE_METHODS:
        foreign = site in ("cross-site", "same-site")
        # Frames and embedded objects navigate, too.
        dest = headers.get("sec-fetch-dest", "document")
        if foreign and (headers.get("sec-fetch-mode"), dest) != ("navigate", "document"):
            msg = "The dashboard answers its own pages only; open it in a tab of its own."
            raise PermissionDeniedError(msg, code=CODE)
        return
    if site is not None:
        if site == "same-origin":
            return
        sent = f"Sec-Fetch-Site: {site[:50]}"
    else:
        origin = headers.get("origin")
        if origin is not None and _host_of(origin) == headers.get("host", "").lower():
            return
        sent = "no Sec-Fetch-Site, " + (
            "no Origin" if origin is None else f"Origin: {origin[:200]}"
        )
    msg = (
        f"This was not sent by a page of this dashboard ({sent}), so nothing was done. Open the "
        "page here and try again there."
    )
    raise PermissionDeniedError(msg, code=CODE)


def _host_of(origin: str) -> str | None:
    """Give the host and port of an Origin header as a Host header writes them."""
    try:
        url = httpx.URL(origin)
    except httpx.InvalidURL:
        return None
    if url.scheme not in ("http", "https") or not url.host:
        return None
    return url.netloc.decode("ascii").lower()
