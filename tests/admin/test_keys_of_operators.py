"""Where admin keys come from: the command line, the start of a stack, and keys older than roles."""

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from alembic import command
from psycopg import errors as pg

from app.__main__ import main
from app.accounts.accounts import SCOPES, USER_SCOPES, create_account, create_key
from app.accounts.keys import find_key, key_digest
from app.kit import migrate
from app.kit.db import Database
from app.kit.ids import new_uuid
from app.stack.credentials import load_keys
from app.stack.postgres import EmbeddedPostgres
from tests.admin.people import ROLES, Dashboard
from tests.fixtures.api import PEPPER
from tests.fixtures.servers import url_of


@pytest.mark.parametrize("role", ROLES)
def test_the_command_line_makes_a_key_of_each_role(
    dashboard: Dashboard, role, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    settings = dashboard.app.state.settings
    for name in ("database_url", "redis_url", "object_store", "models_file"):
        monkeypatch.setenv(f"TILLER_{name.upper()}", str(getattr(settings, name)))
    monkeypatch.setenv("TILLER_KEY_PEPPER", PEPPER)
    assert main(["create-admin", "--name", "the night shift", "--role", role]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["role"] == role
    browser = dashboard.browser()
    assert browser.log_in(made["admin_key"]).status_code == 303
    page = browser.get("/admin/accounts").text
    assert "the night shift" in page
    assert f'<span class="role">{role}</span>' in page
    assert dashboard.number("SELECT count(*) FROM accounts WHERE name = 'operators'") == 1


def test_a_command_line_with_an_unknown_role_makes_nothing(dashboard: Dashboard):
    with pytest.raises(SystemExit):
        main(["create-admin", "--role", "admin"])
    with pytest.raises(SystemExit):
        main(["create-admin", "--name", "x", "--role", "owner"])
    assert dashboard.number("SELECT count(*) FROM api_keys") == 3


def test_the_admin_key_of_a_new_stack_opens_the_dashboard(dashboard: Dashboard, tmp_path: Path):
    with dashboard.database.transaction() as conn:
        keys = load_keys(conn, tmp_path, PEPPER)
    browser = dashboard.browser()
    assert browser.log_in(keys.admin_key).status_code == 303
    assert '<span class="role">admin</span>' in browser.get("/admin/accounts").text
    assert dashboard.browser().log_in(keys.api_key).status_code == 403


def test_a_role_goes_with_the_scope_admin_and_with_no_other_key(dashboard: Dashboard):
    with dashboard.database.transaction() as conn:
        account_id = create_account(conn, "a")
        with pytest.raises(ValueError, match="needs the scope admin"):
            create_key(conn, account_id, PEPPER, name="n", scopes=USER_SCOPES, role="operator")
        plain = create_key(conn, account_id, PEPPER, name="n", scopes=USER_SCOPES)
        whole = create_key(conn, account_id, PEPPER, name="n", scopes=SCOPES)
        found = [find_key(conn, key_digest(made.secret, PEPPER)) for made in (plain, whole)]
    assert [None if key is None else key.role for key in found] == [None, "admin"]
    with pytest.raises(pg.CheckViolation), dashboard.database.transaction() as conn:
        conn.execute("UPDATE api_keys SET role = 'operator' WHERE id = %s", [plain.id])
    with pytest.raises(pg.CheckViolation), dashboard.database.transaction() as conn:
        conn.execute("UPDATE api_keys SET role = NULL WHERE id = %s", [whole.id])


@pytest.fixture
def old_database(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database with the schema that had no roles yet."""
    with psycopg.connect(postgres.url, autocommit=True) as conn:
        conn.execute("CREATE DATABASE before_roles")
    url = url_of(postgres, "before_roles")
    upgrade(url, "0005")
    yield url
    with psycopg.connect(postgres.url, autocommit=True) as conn:
        conn.execute("DROP DATABASE before_roles WITH (FORCE)")


def upgrade(url: str, revision: str, *, down: bool = False) -> None:
    config = migrate._config()
    engine = migrate.sqlalchemy.create_engine(migrate._sqlalchemy_url(url))
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        (command.downgrade if down else command.upgrade)(config, revision)
        connection.commit()
    engine.dispose()


def test_admin_keys_from_before_roles_become_admins(old_database: str):
    keys = {"user": ["completions"], "root": ["admin", "completions"]}
    with psycopg.connect(old_database) as conn:
        account_id = new_uuid()
        conn.execute("INSERT INTO accounts (id, name) VALUES (%s, 'a')", [account_id])
        for name, scopes in keys.items():
            conn.execute(
                """
                INSERT INTO api_keys (id, account_id, name, digest, last4, scopes)
                VALUES (%s, %s, %s, sha256(%s::bytea), 'abcd', %s)
                """,
                [new_uuid(), account_id, name, name.encode(), scopes],
            )
    upgrade(old_database, "0006")
    database = Database(old_database, size_max=1)
    with database.transaction() as conn:
        rows = conn.execute("SELECT name, role FROM api_keys ORDER BY name").fetchall()
    database.close()
    assert [(row["name"], row["role"]) for row in rows] == [("root", "admin"), ("user", None)]
    upgrade(old_database, "0005", down=True)
    upgrade(old_database, "0006")
