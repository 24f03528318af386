"""What the system page shows: versions, settings without secrets, storage, workers' engines."""

import platform
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, SecretStr

from app.admin.filters import duration, size
from app.kit.db import Conn
from app.kit.logs import redact

LIBRARIES: Final = (
    *("fastapi", "starlette", "uvicorn", "pydantic", "psycopg", "celery", "redis"),
    *("obstore", "tokenizers", "pyarrow", "jinja2", "alembic"),
)
MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations" / "versions"
WORKERS_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as it is shown: a secret never is."""

    name: str
    value: str
    meaning: str
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One table and what it fills; rows are Postgres's own estimate."""

    name: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What the database holds, and where objects lie."""

    postgres: str
    revision: str
    revision_needed: str
    database_bytes: int
    tables: list[Stored]


@lru_cache(maxsize=1)
def own_versions() -> list[tuple[str, str]]:
    """List what this process runs on."""
    return [
        ("Tiller", _version("tiller")),
        ("Python", f"{platform.python_version()} on {sys.platform} {platform.machine()}"),
        *((name, _version(name)) for name in LIBRARIES),
    ]


def shown_settings(settings: BaseModel) -> list[Setting]:
    """List the fields of a settings model; secrets and passwords in addresses are hidden."""
    shown = []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            continue
        default = field.get_default(call_default_factory=False)
        shown.append(
            Setting(
                name=name,
                value=_shown(name, value),
                meaning=field.description or "",
                changed=not field.is_required() and value != default,
            )
        )
    return shown


def read_storage(conn: Conn) -> Storage:
    """Read versions and sizes of the database, from its catalogue alone."""
    row = conn.execute(
        """
        SELECT current_setting('server_version') AS postgres,
            pg_database_size(current_database()) AS database_bytes,
            (SELECT version_num FROM alembic_version) AS revision
        """
    ).fetchone()
    assert row is not None
    tables = conn.execute(
        """
        SELECT pg_class.relname AS name, pg_total_relation_size(oid) AS bytes,
            CASE WHEN reltuples < 0 THEN coalesce(n_live_tup, 0)  -- never analysed yet
                ELSE reltuples END::bigint AS rows
        FROM pg_class LEFT JOIN pg_stat_user_tables ON relid = oid
        WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
        ORDER BY bytes DESC, name
        """
    ).fetchall()
    return Storage(
        postgres=row["postgres"],
        revision=row["revision"],
        revision_needed=newest_revision(),
        database_bytes=row["database_bytes"],
        tables=[Stored(**table) for table in tables],
    )


def worker_engines(conn: Conn) -> list[dict[str, Any]]:
    """List what the workers that run have told of themselves."""
    return conn.execute(
        """
        SELECT id, model, model_revision, dtype, engine, mode, host, state FROM workers
        WHERE state <> 'gone' ORDER BY model, id LIMIT %s
        """,
        [WORKERS_MAX],
    ).fetchall()


@lru_cache(maxsize=1)
def newest_revision() -> str:
    """Name the revision that this code needs (its migrations are numbered)."""
    return max(path.name.partition("_")[0] for path in MIGRATIONS.glob("[0-9]*_*.py"))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _measured(name: str, value: float) -> str:
    """Write a number with the unit that the name of its setting tells."""
    number = f"{value:,}" if isinstance(value, int) else f"{value:,g}"
    parts = name.split("_")
    if "bytes" in parts:
        return f"{number} bytes" + (f" ({size(value)})" if value >= 1024 else "")
    if "seconds" in parts:
        return f"{number} s" + (f" ({duration(value)})" if value >= 60 else "")
    if name.endswith("_per_minute"):
        return f"{number} a minute"
    return f"{number} characters" if "chars" in parts else number


def _shown(name: str, value: object) -> str:
    if isinstance(value, SecretStr):
        return "set, not shown" if value.get_secret_value() else "empty"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int | float):
        return str(value) if name == "port" else _measured(name, value)
    text = str(value)
    if "://" in text:
        # Addresses may carry keys behind the question mark.
        address, mark, _ = text.partition("?")
        return redact(address) + ("?…" if mark else "")
    return text
