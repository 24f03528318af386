"""The end of a Job: every request in one row, stats, manifest and checksums, once and for ever."""

import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import orjson
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from app.jobs.claims import finish_shard, give_back_shard
from app.jobs.lifecycle import begin_finalizing, cancel_job
from app.jobs.records import RequestResult
from app.jobs.states import JobState, RequestState
from app.kit.db import Database
from app.results import finalize, missing_parts
from app.results.finalize import finalize_job
from app.results.manifest import listed_files, render_manifest
from app.results.missing_parts import PART_REQUESTS_MAX
from app.results.moments import RunningMoments, merged_stats, moments_table
from app.steering.spec import Reduce, Site
from app.storage import job_key
from tests.results.capture_samples import GENERATED, RAN, a_capture, a_read
from tests.results.samples import HIDDEN, ROWS, open_part
from tests.results.workbench import Workbench


def test_a_finished_job_has_manifest_checksums_and_stats_that_agree(bench: Workbench) -> None:
    job = bench.a_job()
    for _ in range(3):
        bench.run_shard()
    assert bench.finalize(job)
    assert bench.builders.job(job.id).state is JobState.completed
    manifest = orjson.loads(bench.files(job)["manifest.json"])
    assert (manifest["complete"], manifest["status"]) == (True, "completed")
    assert manifest["counts"]["succeeded"] == manifest["counts"]["total"] == 6
    assert manifest["model"] == {
        "id": "tiny", "revision": "revision-1", "hidden_size": HIDDEN, "n_layers": 4,
        "dtype": "float32",
    }  # fmt: skip
    took = manifest["accounting"]
    assert took["total"] == pytest.approx(took["queued"] + took["running"], abs=0.002)
    listed = {file["path"] for file in manifest["files"]}
    present = set(bench.files(job))
    assert present - listed == {"manifest.json", "SHA256SUMS"} | {
        path for path in present if path.startswith("moments/")
    }
    assert sum(file["kind"] == "activations" for file in manifest["files"]) == 6
    lines = sorted(f"{file['sha256']}  {file['path']}\n" for file in manifest["files"])
    assert manifest["root_sha256"] == hashlib.sha256("".join(lines).encode()).hexdigest()
    checked = subprocess.run(
        ["sha256sum", "-c", "--strict", "SHA256SUMS"],
        cwd=bench.folder(job), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert checked.stdout.count(": OK") == len(listed) + 1


def test_stats_are_those_of_all_captured_rows_but_the_first(bench: Workbench) -> None:
    job = bench.a_job()
    for _ in range(3):
        bench.run_shard()
    bench.finalize(job)
    stats = {
        row["layer"]: row for row in pq.read_table(bench.folder(job) / "stats.parquet").to_pylist()
    }
    bits = np.concatenate([bench.run_of(index).bits[3][1:] for index in range(6)])
    values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert stats[3]["count"] == len(values) == 6 * (ROWS - 1)
    np.testing.assert_allclose(stats[3]["mean"], values.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(stats[3]["std"], values.std(axis=0), rtol=1e-9)


def test_a_job_with_work_left_is_not_finished(bench: Workbench) -> None:
    job = bench.a_job()
    assert not bench.finalize(job)
    bench.run_shard()
    assert not bench.finalize(job)
    assert "manifest.json" not in bench.files(job)


def test_requests_cancelled_before_a_lease_have_their_rows(bench: Workbench) -> None:
    job = bench.a_job(requests=9, shard_size=2)
    bench.run_shard()
    bench.database.run(lambda conn: cancel_job(conn, job.id))
    assert bench.finalize(job)
    assert bench.builders.job(job.id).state is JobState.cancelled
    table = ds.dataset(bench.folder(job) / "results").to_table()
    assert table["request_index"].to_pylist() == list(range(9))
    assert table["status"].to_pylist() == ["succeeded"] * 2 + ["cancelled"] * 7
    assert table["text"].to_pylist()[2:] == [None] * 7
    assert table["custom_id"].to_pylist()[8] == "c-8"
    assert PART_REQUESTS_MAX > 7
    files = bench.database.run(lambda conn: listed_files(conn, job.id))
    ranges = [(f.first_index, f.end_index) for f in files if f.kind == "results"]
    assert ranges == [(0, 2), (2, 9)]  # neighbours without a part share one


def test_finalizing_twice_changes_nothing(bench: Workbench) -> None:
    job = bench.a_job(requests=4)
    bench.run_shard()
    bench.run_shard()
    assert bench.finalize(job)
    before, sequence = bench.files(job), bench.builders.job(job.id).sequence
    assert not bench.finalize(job)
    assert bench.files(job) == before
    assert bench.builders.job(job.id).sequence == sequence


@pytest.mark.parametrize("locked", [True, False])
def test_many_finalizers_at_once_finish_a_job_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, *, locked: bool
) -> None:
    if not locked:  # as when a lock was lost with its connection
        monkeypatch.setattr(finalize, "try_lock_finalizer", lambda *_: True)
    job = bench.a_job(requests=8)
    bench.run_shard()
    bench.database.run(lambda conn: cancel_job(conn, job.id))
    pools = [Database(bench.database.url, size_max=3) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(lambda pool: finalize_job(pool, bench.store, job.id), pools))
    for pool in pools:
        pool.close()
    if not any(done):
        assert bench.finalize(job)
    assert sum(done) <= 1 or not locked
    manifest = orjson.loads(bench.files(job)["manifest.json"])
    present = {path for path in bench.files(job) if path.startswith("results/")}
    assert present == {file["path"] for file in manifest["files"] if file["kind"] == "results"}
    rows = ds.dataset(bench.folder(job) / "results").to_table()["request_index"].to_pylist()
    assert rows == list(range(8))


class Crash(Exception):  # noqa: N818
    """Stands for a process that died at this point."""


@pytest.mark.parametrize(
    "step", ["write_missing_parts", "_put_stats", "_put_bytes", "complete_job"]
)
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_step_is_finished_by_the_next_call(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, step: str, *, after: bool
) -> None:
    job = bench.a_job(requests=6)
    bench.run_shard()
    bench.database.run(lambda conn: cancel_job(conn, job.id))
    real = getattr(finalize, step)

    def crash(*args: object) -> object:
        if after and step != "complete_job":
            real(*args)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(finalize, step, crash)
        with pytest.raises(Crash):
            bench.finalize(job)
    assert not bench.builders.job(job.id).state.is_terminal
    assert bench.finalize(job)
    manifest = orjson.loads(bench.files(job)["manifest.json"])
    assert manifest["complete"]
    for file in manifest["files"]:
        assert hashlib.sha256(bench.files(job)[file["path"]]).hexdigest() == file["sha256"]
    assert sum(f["rows"] for f in manifest["files"] if f["kind"] == "results") == 6


def test_a_part_that_no_transaction_named_is_in_no_manifest(bench: Workbench) -> None:
    job = bench.a_job(requests=2)
    shard = bench.builders.a_lease()
    orphan = bench.publish(shard).close()
    bench.database.run(lambda conn: give_back_shard(conn, shard))
    bench.run_shard()
    assert bench.finalize(job)
    manifest = orjson.loads(bench.files(job)["manifest.json"])
    named = {file["path"] for file in manifest["files"]}
    assert not named & {file.path for file in orphan.files}
    assert sum(file["rows"] for file in manifest["files"] if file["kind"] == "results") == 2


def test_the_manifest_grows_with_each_part_and_says_that_it_is_not_complete(
    bench: Workbench,
) -> None:
    job = bench.a_job(requests=4)
    sizes, sequences = [], []
    for _ in range(2):
        bench.run_shard()
        now = bench.builders.job(job.id)
        files = bench.database.run(lambda conn: listed_files(conn, job.id))
        manifest = orjson.loads(
            render_manifest(now, files, finalize.model_shape(bench.store, now, files))
        )
        assert manifest["complete"] is False
        assert manifest["model"]["hidden_size"] == HIDDEN
        sizes.append(len(manifest["files"]))
        sequences.append(manifest["sequence"])
    assert sizes == [3, 6]
    assert sequences[0] < sequences[1]


def test_the_final_manifest_says_the_sequence_that_the_job_then_has(bench: Workbench) -> None:
    job = bench.a_job(requests=2)
    bench.run_shard()
    bench.finalize(job)
    now = bench.builders.job(job.id)
    manifest = orjson.loads(bench.files(job)["manifest.json"])
    assert manifest["sequence"] == now.sequence
    files = bench.database.run(lambda conn: listed_files(conn, job.id))
    again = render_manifest(now, files, finalize.model_shape(bench.store, now, files))
    assert again == bench.files(job)["manifest.json"]


def test_a_job_without_captures_has_no_stats(bench: Workbench) -> None:
    specs = [replace(bench.run_of(0).work.spec, captures=(), interventions=())]
    job = bench.builders.a_job(specs=specs)
    bench.database.run(lambda conn: cancel_job(conn, job.id))
    assert bench.finalize(job)
    assert "stats.parquet" not in bench.files(job)
    assert bench.store.head(job_key(job.id, "SHA256SUMS")) is not None


def test_a_part_whose_commit_was_answered_late_is_named_once(bench: Workbench) -> None:
    job = bench.a_job(requests=3, shard_size=4)
    bench.database.run(lambda conn: cancel_job(conn, job.id))
    begun = bench.database.run(lambda conn: begin_finalizing(conn, job.id))
    assert begun is not None
    assert missing_parts.write_missing_parts(bench.database, bench.store, begun) == 1
    (file,) = bench.database.run(lambda conn: listed_files(conn, job.id))
    token = int(file.path.split(".")[1])
    for number, answer in ((token, True), (token + 1, False)):
        named = bench.database.run(
            lambda conn, number=number: missing_parts._record(conn, begun, number, file)
        )
        assert named is answer
    assert bench.database.run(lambda conn: listed_files(conn, job.id)) == [file]
    assert missing_parts.write_missing_parts(bench.database, bench.store, begun) == 0


def test_the_manifest_says_what_each_file_was_read_from(bench: Workbench) -> None:
    captures = [
        a_capture("residual_stream"),
        a_capture("n", Reduce.norm, site=Site.z, before=True, layers=(0, 2)),
        a_capture("scores", Reduce.project, spans=()),
    ]
    reads = [a_read(index, captures) for index in range(2)]
    job = bench.builders.a_job(specs=[read.work.spec for read in reads], shard_size=1)
    for _ in reads:
        shard = bench.builders.a_lease()
        writer = open_part(shard, bench.store, bench.tmp_path / "spool")
        read = reads[shard.first_index]
        writer.add(read.work, read.outcome)
        done = RequestResult(shard.first_index, RequestState.succeeded, completion_tokens=GENERATED)
        part = writer.close()
        bench.database.run(
            lambda conn, shard=shard, done=done, part=part: finish_shard(conn, shard, [done], part)
        )
    assert bench.finalize(job)
    manifest = orjson.loads(bench.files(job)["manifest.json"])
    said = {
        (f["kind"], f["capture"], f["layer"], f["site"], f["when"], f["reduce"], f["width"])
        for f in manifest["files"]
    }
    assert said == {
        ("results", None, None, None, None, None, None),
        ("activations", None, 1, "resid_post", "after", "none", HIDDEN),
        ("captures", "n", 0, "z", "before", "norm", 1),
        ("captures", "n", 2, "z", "before", "norm", 1),
        ("captures", "scores", 1, "resid_post", "after", "project", 3),
        ("stats", None, None, None, None, None, None),
    }
    assert [f["rows"] for f in manifest["files"] if f["capture"] == "scores"] == [0, 0]
    stats = pq.read_table(bench.folder(job) / "stats.parquet").to_pylist()
    assert [(row["capture"], row["layer"], row["count"]) for row in stats] == [
        ("n", 0, 2 * (RAN - 1)), ("n", 2, 2 * (RAN - 1)), ("residual_stream", 1, 2 * (RAN - 1)),
    ]  # fmt: skip


def test_parts_that_disagree_about_a_capture_do_not_keep_a_job_from_ending() -> None:
    tables = []
    for width in (2, 3, 2):
        moments = RunningMoments(width)
        moments.add(np.ones((4, width), dtype=np.float32), np.ones(4, dtype=np.bool_))
        tables.append(moments_table({("p", 0): moments}))
    rows = merged_stats(tables).to_pylist()
    assert [(len(row["mean"]), row["count"]) for row in rows] == [(2, 8), (3, 4)]
