"""`python -m app check PART`: the container's question whether its process works.

The API is asked over HTTP. Reconciler and worker have no port: what they wrote into Postgres is
looked at, so a process that hangs is found out although it is alive.
"""

import socket
import urllib.error
import urllib.request
from typing import Final

import psycopg
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.kit.db import session_settings

PARTS: Final = ("api", "reconciler", "worker")
HTTP_SECONDS = 3
WORKER_SILENT_SECONDS = 60
# A round may finish large Jobs one after the other.
RECONCILER_SILENT_SECONDS = 300


class CheckSettings(BaseSettings):
    """What any of our containers knows."""

    model_config = SettingsConfigDict(env_prefix="TILLER_", frozen=True, extra="ignore")

    database_url: str = Field(description="postgresql://… of the one truth.")
    port: int = Field(8400, description="Port that the API listens on.")


def check(part: str, settings: CheckSettings) -> str | None:
    """Give the reason why a part on this machine does not work; None when it does."""
    if part == "api":
        return _api(settings.port)
    try:
        with psycopg.connect(settings.database_url, **session_settings()) as conn:
            return _worker(conn) if part == "worker" else _reconciler(conn)
    except psycopg.Error:
        # Restarting this process would not bring Postgres back.
        return None


def _api(port: int) -> str | None:
    address = f"http://127.0.0.1:{port}/healthz"
    try:
        with urllib.request.urlopen(address, timeout=HTTP_SECONDS):
            return None
    except (urllib.error.URLError, OSError) as error:
        return f"{address} does not answer: {error}"


def _worker(conn: psycopg.Connection[dict[str, object]]) -> str | None:
    found = conn.execute(
        """
        SELECT 1 FROM workers WHERE host = %s AND state <> 'gone'
            AND heartbeat_at > now() - make_interval(secs => %s) LIMIT 1
        """,
        [socket.gethostname(), WORKER_SILENT_SECONDS],
    ).fetchone()
    return None if found else f"no worker of {socket.gethostname()} was heard of lately"


def _reconciler(conn: psycopg.Connection[dict[str, object]]) -> str | None:
    found = conn.execute(
        "SELECT 1 FROM samples WHERE at > now() - make_interval(secs => %s) LIMIT 1",
        [RECONCILER_SILENT_SECONDS],
    ).fetchone()
    return None if found else "no reconciler has finished a round lately"
