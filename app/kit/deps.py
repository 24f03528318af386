"""What endpoints of every feature may ask for: settings, database, the body and work on it."""

from collections.abc import Callable
from typing import Annotated, TypeVar

from anyio import to_thread
from fastapi import Depends, Request

from app.errors import InvalidRequestError
from app.kit.db import Database
from app.kit.large_bodies import turn_of_body
from app.settings import Settings

T = TypeVar("T")


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
    """Run blocking work on the request's body in a thread; on a large one when its turn comes.

    Raises TooManyRequestsError (intake_full) when it does not come in time.
    """
    async with turn_of_body(len(body)):
        return await to_thread.run_sync(work)


SettingsDep = Annotated[Settings, Depends(settings_of)]
DatabaseDep = Annotated[Database, Depends(database_of)]
BodyDep = Annotated[bytes, Depends(body_of)]
