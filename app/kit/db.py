"""Connections to Postgres: one pool per process, one transaction per arrow.

psycopg is used directly. Its type hints accept literal SQL only, so SQL that is put together
from strings fails `make lint`. Every session carries timeouts: a query on a dead connection, a
lock that nobody gives back or a forgotten transaction ends in an error, never in a hang.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool, PoolTimeout

Conn: TypeAlias = psycopg.Connection[DictRow]
T = TypeVar("T")

ATTEMPTS_MAX = 5
# Serialization failure, deadlock, a process that stood still inside a transaction, a server that
# shuts down or starts up, a lost connection: the transaction may be run again from its start.
# psycopg reports a lost connection as OperationalError, the parent of most others named here.
RETRIED = (
    pg.SerializationFailure,
    pg.DeadlockDetected,
    pg.IdleInTransactionSessionTimeout,
    psycopg.OperationalError,
    psycopg.InterfaceError,
)


class DatabaseUnavailableError(Exception):
    """Postgres could not be reached within the time allowed."""


class Database:
    """A pool of connections to one Postgres database.

    Use `transaction()` where a caller can report the failure at once, `run()` where the work may
    be repeated as a whole (every write of worker and reconciler is safe to repeat), `read()` where
    several statements together say how something stands.
    """

    def __init__(self, url: str, *, size_max: int = 8, wait_seconds: float = 10.0) -> None:
        """Open a pool of at most `size_max` connections; connects in the background."""
        self.url = url
        self._pool: ConnectionPool[Conn] = ConnectionPool(
            url,
            min_size=1,
            max_size=size_max,
            timeout=wait_seconds,
            open=True,
            kwargs=session_settings(),
            check=ConnectionPool.check_connection,
            reconnect_timeout=30.0,
        )

    def close(self) -> None:
        """Close every connection of the pool."""
        self._pool.close()

    @contextmanager
    def transaction(self) -> Iterator[Conn]:
        """Give a connection inside a transaction: commit at the end, roll back on an error.

        Raises DatabaseUnavailableError when no connection can be had.
        """
        try:
            with self._pool.connection() as conn:
                yield conn
        except PoolTimeout as error:
            raise DatabaseUnavailableError("Postgres cannot be reached.") from error

    def run(self, work: Callable[[Conn], T], *, attempts: int = ATTEMPTS_MAX) -> T:
        """Run `work` in a transaction, and again after a failure that a new try can cure.

        A commit whose answer was lost is repeated too, so `work` must find its own effect
        (writes name a lease token or an idempotency key). Raises the last error.
        """
        for attempt in range(1, attempts + 1):
            try:
                with self.transaction() as conn:
                    return work(conn)
            except (*RETRIED, DatabaseUnavailableError):
                if attempt == attempts:
                    raise
                time.sleep(random.uniform(0.05, 0.2) * 2**attempt)  # noqa: S311 (jitter, no secret)
        raise AssertionError

    def read(self, work: Callable[[Conn], T]) -> T:
        """Run `work`, which only reads, on one snapshot: all its statements see the same moment.

        Retried as `run` is; a statement that writes raises ReadOnlySqlTransaction.
        """

        def at_one_moment(conn: Conn) -> T:
            take_snapshot(conn)
            return work(conn)

        return self.run(at_one_moment)


def take_snapshot(conn: Conn) -> None:
    """Let a transaction that has just begun see one moment in all its statements, and only read."""
    conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")


def session_settings() -> dict[str, Any]:
    """Connection arguments that every session of Tiller shares.

    Plans are made for the values at hand: a generic plan, made while a table was small or without
    statistics, was seen to read a whole Job for each of its shards.
    """
    return {
        "row_factory": dict_row,
        "autocommit": False,
        "connect_timeout": 5,
        "keepalives": 1,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "application_name": "tiller",
        "options": (
            "-c statement_timeout=30000 -c lock_timeout=10000 "
            "-c idle_in_transaction_session_timeout=10000 -c timezone=UTC "
            "-c plan_cache_mode=force_custom_plan"
        ),
    }
