"""Fixtures of every test: a real Postgres and Redis, and a fresh database for each test."""

from tests.fixtures.builders import builders
from tests.fixtures.servers import (
    database,
    database_url,
    guardian,
    object_store_url,
    postgres,
    redis_server,
    redis_url,
    template_database,
)

__all__ = [
    "builders",
    "database",
    "database_url",
    "guardian",
    "object_store_url",
    "postgres",
    "redis_server",
    "redis_url",
    "template_database",
]
