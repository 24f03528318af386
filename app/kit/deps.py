"""What endpoints of every feature may ask for: settings, database, body and the request's id."""

from typing import Annotated

from fastapi import Depends, Request

from app.errors import InvalidRequestError
from app.kit.db import Database
from app.settings import Settings


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


SettingsDep = Annotated[Settings, Depends(settings_of)]
DatabaseDep = Annotated[Database, Depends(database_of)]
BodyDep = Annotated[bytes, Depends(body_of)]
