"""Checks that everything the service knows and has published is true; used after every step.

Postgres: all invariants, and every recorded change of state against states.py. Object store:
each named file exists with its size, checksum and rows, and the results hold exactly one row for
each terminal request and choice.
"""

import hashlib
import io
from collections import Counter
from typing import Any

import psycopg
import pyarrow.parquet as pq

from app.completions.states import COMPLETION_MOVES
from app.jobs.invariants import check_invariants
from app.jobs.states import JOB_MOVES, REQUEST_MOVES, SHARD_MOVES
from app.kit.db import Conn, Database
from app.storage import ObjectStore, job_key

# A stored request is pending while it runs: running is what a leased shard makes of it.
STORED_REQUEST_MOVES = {
    "pending": REQUEST_MOVES["pending"] | REQUEST_MOVES["running"],
    **{state: moves for state, moves in REQUEST_MOVES.items() if state.is_terminal},
}
MOVES = {
    "job": JOB_MOVES,
    "request": STORED_REQUEST_MOVES,
    "shard": SHARD_MOVES,
    "completion": COMPLETION_MOVES,
}


def check_everything(database: Database, store: ObjectStore | None = None) -> None:
    """Assert all that is promised, on one snapshot; files only when a store is given."""
    with database.transaction() as conn:
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        problems: list[object] = [*check_invariants(conn), *illegal_moves(conn)]
        if store is not None:
            problems += [*broken_files(conn, store), *wrong_rows(conn, store)]
    assert not problems, "\n".join(map(str, problems))


def illegal_moves(conn: Conn) -> list[str]:
    """List recorded changes that states.py does not allow, and leases whose token went back."""
    try:
        with conn.transaction():
            moves = conn.execute("SELECT * FROM test_moves ORDER BY id").fetchall()
    except psycopg.errors.UndefinedTable:
        return []  # a database that the test suite did not make
    wrong = []
    last_token: dict[str, int] = {}
    for move in moves:
        kind, before, after = move["kind"], move["before"], move["after"]
        if before != after and after not in MOVES[kind][before]:
            wrong.append(f"{kind} {move['row_id']}: {before} -> {after}")
        if kind == "shard" and after == "leased":
            if move["token_after"] <= last_token.get(move["row_id"], 0):
                wrong.append(f"shard {move['row_id']}: token {move['token_after']} came again")
            last_token[move["row_id"]] = move["token_after"]
    return wrong


def broken_files(conn: Conn, store: ObjectStore) -> list[str]:
    """List files of parts that count (and of finished Jobs) that are not what their row says."""
    wrong = []
    for row in _named_files(conn):
        key = job_key(row["job_id"], row["path"])
        meta = store.head(key)
        if meta is None:
            wrong.append(f"{key} is missing")
            continue
        data = store.get_bytes(key)
        rows = pq.read_metadata(io.BytesIO(data)).num_rows if key.endswith(".parquet") else None
        if (meta.size, hashlib.sha256(data).hexdigest()) != (row["bytes"], row["sha256"]):
            wrong.append(f"{key} differs from its row")
        elif rows is not None and rows != row["rows"]:
            wrong.append(f"{key} has {rows} rows, not {row['rows']}")
    return wrong


def wrong_rows(conn: Conn, store: ObjectStore) -> list[str]:
    """List requests whose rows in the results are not what their state demands."""
    found: Counter[tuple[Any, int, str]] = Counter()
    for row in _named_files(conn):
        if row["kind"] != "results":
            continue
        data = store.get_bytes(job_key(row["job_id"], row["path"]))
        columns = ["request_index", "choice_index", "status"]
        table = pq.read_table(io.BytesIO(data), columns=columns).to_pydict()
        order = list(zip(table["request_index"], table["choice_index"], strict=True))
        assert order == sorted(set(order)), f"{row['path']}: rows out of order or doubled"
        for index, status in zip(table["request_index"], table["status"], strict=True):
            found[row["job_id"], index, status] += 1
    wrong = []
    for request in conn.execute(
        """
        SELECT requests.job_id, request_index, requests.state, jobs.finished_at,
            coalesce((spec->'sampling'->>'n')::integer, 1) AS n
        FROM requests JOIN jobs ON jobs.id = requests.job_id
        """
    ):
        job_id, index, state = request["job_id"], request["request_index"], request["state"]
        rows = found.pop((job_id, index, state), 0)
        expected = request["n"] if state == "succeeded" else 1
        # Requests that never ran get their row when the Job is finished.
        may_lack = state in ("cancelled", "expired") and request["finished_at"] is None
        if state == "pending":
            expected = 0
        if rows != expected and not (may_lack and rows == 0):
            wrong.append(f"{job_id}/{index} is {state} and has {rows} rows, not {expected}")
    wrong += [f"{key} has {rows} rows too many" for key, rows in found.items()]
    return wrong


def _named_files(conn: Conn) -> list[dict[str, Any]]:
    return conn.execute(
        """
        SELECT result_files.* FROM result_files LEFT JOIN parts USING (lease_token)
        WHERE parts.superseded_at IS NULL ORDER BY result_files.job_id, path
        """
    ).fetchall()
