"""How fast requests go through everything but a model: fan-out, lease, run, publish, settle.

Two real worker processes around the tests' stub engine, which answers at once; real Postgres with
fsync, real parts. The time is that of Postgres, from the first lease of the Job to its last
finished shard.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from app.kit.db import Conn
from app.queue import Waker
from bench.service_parts import BareService, wait_until
from tests.fixtures.builders import a_spec, insert_job
from tests.fixtures.tiny_model import write_tiny_model

WORKERS = 2
FIGURE = "jobs.settle_requests_per_s"


def run_job(service: BareService, waker: Waker, requests: int, shard: int) -> float:
    """Run one Job to its end; give requests a second."""
    spec = a_spec(prompt_tokens=20, max_tokens=16)

    def insert(conn: Conn) -> Any:
        specs = [spec] * requests
        return insert_job(conn, service.account_id, specs=specs, shard_size=shard)

    job = service.database.run(insert, attempts=1)
    waker.wake("tiny")

    def look(conn: Conn) -> dict[str, Any]:
        row = conn.execute(
            """
            SELECT bool_and(state = 'done') AS done, count(DISTINCT worker_id) AS workers,
                extract(epoch FROM max(finished_at) - min(leased_at))::float8 AS seconds
            FROM shards WHERE job_id = %s
            """,
            [job.id],
        ).fetchone()
        assert row is not None
        return row

    wait_until(lambda: bool(service.database.run(look)["done"]), 600)
    seconds = service.database.run(look)["seconds"]

    def charged(conn: Conn) -> dict[str, Any] | None:
        return conn.execute(
            """
            SELECT n_succeeded, tokens_held, tokens_charged,
                (SELECT count(*) FROM result_files
                    WHERE job_id = jobs.id AND kind = 'results') AS parts
            FROM jobs WHERE id = %s
            """,
            [job.id],
        ).fetchone()

    row = service.database.run(charged)
    assert row is not None
    wanted = {"n_succeeded": requests, "tokens_held": 0, "tokens_charged": requests * 36}
    assert row | wanted == row, row
    assert row["parts"] > 0
    return float(requests / seconds)


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, float], list[str]]:
    """Run Jobs one after the other; give figures and lines of the table."""
    requests, shard = options.settle_requests, options.settle_shard
    models = write_tiny_model(folder)
    with BareService(folder, models) as service:
        service.start("reconciler", ["-m", "app", "reconcile"])
        service.start_stub_workers(WORKERS, "tiny", STUB_SECONDS="0")
        waker = Waker(service.redis.url)
        run_job(service, waker, min(requests, 1000), shard)  # warms pools and plans
        speeds = [run_job(service, waker, requests, shard) for _ in range(options.repeats)]
        waker.close()
    median = statistics.median(speeds)
    line = (
        f"| settle, Jobs of {requests} requests in shards of {shard}, {WORKERS} workers with a stub"
        f" engine, requests/s ({min(speeds):.0f} to {max(speeds):.0f}) | {median:.0f} | 2000 |"
    )
    return {FIGURE: round(median)}, [line]
