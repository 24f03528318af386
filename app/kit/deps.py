"""What endpoints of every feature may ask for: settings, database, the body and work on it."""

from collections.abc import Callable
from typing import Annotated, Final, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from fastapi import Depends, Request

from app.errors import InvalidRequestError
from app.kit.db import Database
from app.settings import Settings

T = TypeVar("T")

LARGE_BODY_BYTES: Final = 1024 * 1024
LARGE_AT_ONCE: Final = 2  # a large body may take ten times its size until it has been read
_LARGE: Final = RunVar[CapacityLimiter]("large bodies that are worked on")


def settings_of(request: Request) -> Settings:
    """Give the settings that create_app was called with."""
    settings: Settings = request.app.state.settings
    return settings


def database_of(request: Request) -> Database:
    """Give the pool of connections to Postgres."""
    database: Database = request.app.state.database
    return database


async def body_of(request: Request) -> bytes:
    """Read the body, which BodyLimitMiddleware has capped."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        msg = f"The body has content-encoding {encoding[:50]!r}; send it uncompressed."
        raise InvalidRequestError(msg)
    return await request.body()


async def work_on(body: bytes, work: Callable[[], T]) -> T:
    """Run blocking work on a body in a thread; few large ones at once, which hold up no others."""
    limiter: CapacityLimiter | None = None
    if len(body) > LARGE_BODY_BYTES:
        limiter = _LARGE.get(None)
        if limiter is None:
            limiter = CapacityLimiter(LARGE_AT_ONCE)
            _LARGE.set(limiter)
    return await to_thread.run_sync(work, limiter=limiter)


SettingsDep = Annotated[Settings, Depends(settings_of)]
DatabaseDep = Annotated[Database, Depends(database_of)]
BodyDep = Annotated[bytes, Depends(body_of)]
