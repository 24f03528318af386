"""Bring a database to the newest schema.

An advisory lock makes several processes that start at once take turns. lock_timeout keeps a
migration from queueing behind a long reader and blocking everyone after it.
"""

from pathlib import Path

import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
_LOCK_ID = 7_415_332  # any number, the same in every process


def migrate(url: str) -> str:
    """Upgrade the database at `url` (postgresql://…) to the newest revision; return its name."""
    config = _config()
    engine = sqlalchemy.create_engine(_sqlalchemy_url(url), poolclass=sqlalchemy.NullPool)
    try:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("SET lock_timeout = '5s'"))
            connection.execute(
                sqlalchemy.text("SELECT pg_advisory_lock(:lock)"), {"lock": _LOCK_ID}
            )
            connection.commit()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()
    finally:
        engine.dispose()
    return newest_revision()


def newest_revision() -> str:
    """Name the revision that this code needs."""
    return ScriptDirectory.from_config(_config()).get_current_head() or ""


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
