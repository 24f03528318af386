"""Bring a database to the newest schema.

An advisory lock makes several processes that start at once take turns. lock_timeout keeps a
migration from queueing behind a long reader and blocking everyone after it.
"""

from functools import cache
from pathlib import Path

import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from app.kit.db import Conn

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
_LOCK_ID = 7_415_332  # any number, the same in every process


def migrate(url: str) -> str:
    """Upgrade the database at `url` (postgresql://…) to the newest revision; return its name.

    A schema that newer code made is left as it is: after an upgrade that is taken back, the old
    code runs on it.
    """
    config = _config()
    engine = sqlalchemy.create_engine(_sqlalchemy_url(url), poolclass=sqlalchemy.NullPool)
    try:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("SET lock_timeout = '5s'"))
            connection.execute(
                sqlalchemy.text("SELECT pg_advisory_lock(:lock)"), {"lock": _LOCK_ID}
            )
            connection.commit()
            known, newest = _revisions()
            found = MigrationContext.configure(connection).get_current_revision()
            connection.commit()  # each migration has a transaction of its own
            if found is not None and found not in known:
                return found
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()
            return newest
    finally:
        engine.dispose()


def newest_revision() -> str:
    """Name the revision that this code needs."""
    return ScriptDirectory.from_config(_config()).get_current_head() or ""


def is_behind(conn: Conn) -> bool:
    """Tell whether the schema lacks a migration of this code; a newer schema lacks none."""
    found = conn.execute("SELECT to_regclass('alembic_version') IS NOT NULL AS made").fetchone()
    if found is None or not found["made"]:
        return True
    row = conn.execute("SELECT version_num FROM alembic_version").fetchone()
    known, newest = _revisions()
    return row is None or (row["version_num"] in known and row["version_num"] != newest)


@cache
def _revisions() -> tuple[frozenset[str], str]:
    """Name every revision that this code knows, and the newest."""
    script = ScriptDirectory.from_config(_config())
    known = frozenset(revision.revision for revision in script.walk_revisions())
    return known, script.get_current_head() or ""


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return config


def _sqlalchemy_url(url: str) -> str:
    scheme, rest = url.split("://", 1)
    if scheme not in ("postgresql", "postgres"):
        msg = f"TILLER_DATABASE_URL must begin with postgresql://, not {scheme}://"
        raise ValueError(msg)
    return f"postgresql+psycopg://{rest}"
