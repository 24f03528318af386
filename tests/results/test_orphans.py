"""Objects that nobody names go after a day; everything else stays."""

import os
import time
from pathlib import Path

from app.jobs.lifecycle import cancel_job
from app.kit.db import Database
from app.kit.ids import new_uuid
from app.results.finalize import finalize_job
from app.results.orphans import collect_orphan_parts
from app.storage import job_folder, open_store
from tests.fixtures.builders import Builders


def age(folder: Path, hours: float) -> None:
    """Make every file below a folder older."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - hours * 3600,) * 2)


def test_only_old_objects_that_no_live_part_names_are_deleted(
    database: Database, builders: Builders, object_store_url: str, tmp_path: Path
) -> None:
    store = open_store(object_store_url)
    job = builders.a_job(requests=3)
    database.run(lambda conn: cancel_job(conn, job.id))
    assert finalize_job(database, store, job.id)
    folder = tmp_path / "objects" / job_folder(job.id)
    kept = {path for path in folder.rglob("*") if path.is_file()}
    store.put_bytes(b"orphan", f"{job_folder(job.id)}/results/part-0000000.999.parquet")
    store.put_bytes(b"gone", f"{job_folder(new_uuid())}/manifest.json")
    store.put_bytes(b"not ours", "jobs/readme/file")
    (folder / "results/half#7").write_bytes(b"half")
    assert collect_orphan_parts(database, store) == 0
    age(tmp_path / "objects", hours=25)
    store.put_bytes(b"new", f"{job_folder(job.id)}/results/part-0000000.1000.parquet")
    assert collect_orphan_parts(database, store) == 3
    left = {path for path in folder.rglob("*") if path.is_file()}
    assert left == kept | {folder / "results/part-0000000.1000.parquet"}
    assert store.get_bytes("jobs/readme/file") == b"not ours"


def test_a_replaced_part_stays_for_downloads_and_goes_a_day_later(
    database: Database, builders: Builders, object_store_url: str, tmp_path: Path
) -> None:
    store = open_store(object_store_url)
    job = builders.a_job(requests=3)
    database.run(lambda conn: cancel_job(conn, job.id))
    finalize_job(database, store, job.id)
    age(tmp_path / "objects", hours=25)
    for hours, deleted in ((1, 0), (30, 1)):
        database.run(lambda conn, hours=hours: conn.execute(
            "UPDATE parts SET superseded_at = now() - make_interval(hours => %s)", [hours]
        ).rowcount)  # fmt: skip
        assert collect_orphan_parts(database, store) == deleted
