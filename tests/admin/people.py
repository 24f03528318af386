"""A browser at the dashboard: keeps cookies, sends what a browser sends, follows nothing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.accounts.accounts import create_account, create_key
from app.accounts.keys import Role
from app.admin.audit_pages import AuditEntry, list_audit
from app.kit.db import Database
from app.main import create_app
from app.stack.postgres import EmbeddedPostgres
from app.stack.redis import EmbeddedRedis
from tests.fixtures.api import PEPPER, settings_for
from tests.fixtures.cleaning import empty_database
from tests.fixtures.servers import cloned

SAME_ORIGIN = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "navigate"}
ROLES: tuple[Role, ...] = ("read-only", "operator", "admin")


@dataclass
class Browser:
    """One browser; `base` may be another scheme or host."""

    app: FastAPI
    base: str = "http://testserver"
    client: TestClient = field(init=False)

    def __post_init__(self) -> None:
        self.client = TestClient(
            self.app, self.base, follow_redirects=False, raise_server_exceptions=False
        )

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=headers)

    def post(self, path: str, /, **fields: Any) -> httpx.Response:
        return self.client.post(path, data=fields, headers=SAME_ORIGIN)

    def log_in(self, key: str, **fields: str) -> httpx.Response:
        return self.post("/admin/login", key=key, **fields)


@dataclass
class Dashboard:
    """The dashboard, its database and its people."""

    app: FastAPI
    database: Database
    keys: dict[Role, str]

    def browser(self, role: Role | None = None, *, base: str = "http://testserver") -> Browser:
        """Open a browser, logged in when a role is given."""
        browser = Browser(self.app, base)
        if role is not None:
            answer = browser.log_in(self.keys[role])
            assert answer.status_code == 303, answer.text
        return browser

    def a_key(self, *, scopes: set[str], role: Role | None = None, name: str = "a key") -> str:
        """Make a key of an account of its own."""
        with self.database.transaction() as conn:
            account_id = create_account(conn, "an account")
            made = create_key(conn, account_id, PEPPER, name=name, scopes=scopes, role=role)
        return made.secret

    def audit(self, action: str | None = None) -> list[AuditEntry]:
        """Read the audit log, newest first."""
        with self.database.transaction() as conn:
            return list_audit(conn, action=action)

    def number(self, query: str, *values: object) -> Any:
        """Read one value."""
        with self.database.transaction() as conn:
            row = conn.execute(query, list(values)).fetchone()  # type: ignore[arg-type]
        assert row is not None
        (value,) = row.values()
        return value


@pytest.fixture(scope="module")
def running_dashboard(
    postgres: EmbeddedPostgres,
    template_database: str,
    redis_server: EmbeddedRedis,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Dashboard]:
    """One application on one database for all tests of a module (a clone costs seconds)."""
    with cloned(postgres, template_database) as url:
        settings = settings_for(
            tmp_path_factory.mktemp("dashboard"), database_url=url, redis_url=redis_server.url
        )
        app = create_app(settings)
        database = Database(url, size_max=4)
        with TestClient(app):
            yield Dashboard(app, database, {})
        database.close()


@pytest.fixture
def dashboard(running_dashboard: Dashboard) -> Dashboard:
    """The dashboard with an empty database, but for a key of each role."""
    database = running_dashboard.database
    with database.transaction() as conn:
        conn.execute("ALTER TABLE audit_log DISABLE TRIGGER USER")
        conn.execute("TRUNCATE audit_log, invariant_runs, workers")
        conn.execute("ALTER TABLE audit_log ENABLE TRIGGER USER")
    empty_database(database)
    with database.transaction() as conn:
        account_id = create_account(conn, "operators")
        for role in ROLES:
            made = create_key(conn, account_id, PEPPER, name=role, scopes={"admin"}, role=role)
            running_dashboard.keys[role] = made.secret
    return running_dashboard


def form_token(page: str) -> str:
    """Find the token in a form of a page; a fresh one when the page has none."""
    found = re.search(r'name="form_token" value="([0-9a-f-]{36})"', page)
    return found[1] if found else str(uuid4())
