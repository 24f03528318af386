"""Transactions that are run again, and reads of one moment."""

import time

import pytest
from psycopg import errors as pg

from app.kit.db import Conn, Database


def number(conn: Conn, query: str) -> int:
    """Read one number."""
    row = conn.execute(query).fetchone()  # type: ignore[arg-type]
    assert row is not None
    return int(next(iter(row.values())))


def wait_until_ended(database: Database, pid: int) -> None:
    """Wait until a session is gone."""
    deadline = time.monotonic() + 30
    look = f"SELECT count(*) FROM pg_stat_get_activity({pid})"
    # Each look in a transaction of its own: within one, the answer stays the same.
    while database.run(lambda conn: number(conn, look)):
        assert time.monotonic() < deadline, "the session goes on"
        time.sleep(0.01)


def test_what_stood_still_inside_a_transaction_is_run_again(database: Database) -> None:
    tries: list[int] = []

    def stand_still(conn: Conn) -> int:
        tries.append(number(conn, "SELECT pg_backend_pid()"))
        if len(tries) == 1:
            conn.execute("SET LOCAL idle_in_transaction_session_timeout = 50")
            wait_until_ended(database, tries[0])
        return number(conn, "SELECT 7")

    assert database.run(stand_still) == 7
    assert len(set(tries)) == 2


def test_a_read_sees_one_moment_and_writes_nothing(database: Database) -> None:
    count = "SELECT count(*) FROM accounts"

    def look_twice(conn: Conn) -> tuple[int, int]:
        before = number(conn, count)
        with database.transaction() as other:
            other.execute("INSERT INTO accounts (id, name) VALUES (gen_random_uuid(), 'new')")
        return before, number(conn, count)

    assert database.read(look_twice) == (0, 0)
    assert database.read(lambda conn: number(conn, count)) == 1
    with pytest.raises(pg.ReadOnlySqlTransaction):
        database.read(lambda conn: conn.execute("DELETE FROM accounts"))
