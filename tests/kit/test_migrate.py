"""Migrations that meet a schema which is not of this code."""

from app.kit.db import Database
from app.kit.migrate import is_behind, migrate, newest_revision


def test_the_old_code_leaves_a_schema_of_newer_code_as_it_is(
    database: Database, database_url: str
) -> None:
    with database.transaction() as conn:
        conn.execute("UPDATE alembic_version SET version_num = '9999'")
        conn.execute("ALTER TABLE jobs ADD COLUMN of_the_newer_code integer DEFAULT 1")
    assert migrate(database_url) == "9999"
    with database.transaction() as conn:
        assert not is_behind(conn)
        conn.execute("SELECT of_the_newer_code FROM jobs")


def test_a_second_migration_changes_nothing_and_an_empty_database_gets_everything(
    database: Database, database_url: str
) -> None:
    assert migrate(database_url) == newest_revision()
    with database.transaction() as conn:
        conn.execute("DROP SCHEMA public CASCADE")
        conn.execute("CREATE SCHEMA public")
        assert is_behind(conn)
    assert migrate(database_url) == newest_revision()
    with database.transaction() as conn:
        assert not is_behind(conn)
        conn.execute("SELECT 1 FROM jobs, samples")
