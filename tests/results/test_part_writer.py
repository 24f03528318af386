"""Outcomes become a part: exact numbers, promised order, nothing left behind."""

import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from app.jobs.records import LeasedShard, PublishedPart
from app.results.parquet_file import ParquetFile
from app.results.schema import RESULTS, row_group_rows
from app.storage import ObjectStore, job_key, open_store
from tests.results.samples import (
    GENERATED,
    HIDDEN,
    PROMPT,
    ROWS,
    Ran,
    a_plain_run,
    a_run,
    a_shard,
    open_part,
)  # fmt: skip
from worker import part_writer
from worker.outcomes import Cancelled, Errored
from worker.part_writer import PartClosedError, StoreAwayError


@pytest.fixture
def store(object_store_url: str) -> ObjectStore:
    """An empty store in a folder."""
    return open_store(object_store_url)


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    """The folder behind `store`."""
    return tmp_path / "objects"


def everything_in(folder: Path) -> list[Path]:
    """List the files below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def test_bfloat16_comes_back_bit_for_bit(store: ObjectStore, objects: Path, tmp_path: Path) -> None:
    shard = a_shard(end=3)
    runs = [a_run(index, tmp_path / "mapped") for index in range(3)]
    writer = open_part(shard, store, tmp_path / "spool")
    for run in runs:
        writer.add(run.work, run.outcome)
    part = writer.close()
    for layer in (1, 3):
        file = next(file for file in part.files if file.layer == layer)
        table = pq.read_table(objects / job_key(shard.job_id, file.path))
        values = table["residual"].combine_chunks().flatten().to_numpy().reshape(-1, HIDDEN)
        wanted = np.concatenate([run.bits[layer] for run in runs])
        words = values.view(np.uint32)
        assert np.array_equal((words >> 16).astype(np.uint16), wanted)
        assert not (words & 0xFFFF).any()


def test_there_are_p_plus_g_minus_1_rows_that_say_what_they_are(
    store: ObjectStore, objects: Path, tmp_path: Path
) -> None:
    shard = a_shard(end=1)
    run = a_run(0, tmp_path / "mapped")
    writer = open_part(shard, store, tmp_path / "spool")
    writer.add(run.work, run.outcome)
    part = writer.close()
    steered, read_only = (file for file in part.files if file.kind == "activations")
    assert steered.rows == read_only.rows == PROMPT + GENERATED - 1
    table = pq.read_table(objects / job_key(shard.job_id, steered.path))
    tokens = (*run.work.spec.prompt_token_ids, *run.outcome.choices[0].token_ids)
    assert table["token_id"].to_pylist() == list(tokens[:ROWS])
    assert table["position"].to_pylist() == list(range(ROWS))
    assert table["is_generated"].to_pylist() == [False] * PROMPT + [True] * (ROWS - PROMPT)
    assert table["steered"].to_pylist() == [p in (1, 2) for p in range(ROWS)]
    assert set(table["custom_id"].to_pylist()) == {"c-0"}
    other = pq.read_table(objects / job_key(shard.job_id, read_only.path))
    assert not any(other["steered"].to_pylist())


def test_rows_are_in_order_whatever_order_requests_finish_in(
    store: ObjectStore, objects: Path, tmp_path: Path
) -> None:
    shard = a_shard(first=100, end=160)
    runs = [a_run(index, tmp_path / "mapped") for index in range(100, 160)]
    random.Random(1).shuffle(runs)
    writer = open_part(shard, store, tmp_path / "spool")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda run: writer.add(run.work, run.outcome), runs))
    part = writer.close()
    for file in part.files[:3]:
        table = pq.read_table(objects / job_key(shard.job_id, file.path))
        indices = table["request_index"].to_pylist()
        assert indices == sorted(indices)
        assert set(indices) == set(range(100, 160))
        assert (file.first_index, file.end_index) == (100, 160)
    assert "part-0000100.17.parquet" in part.files[0].path


def test_checksums_and_sizes_are_those_of_the_published_files(
    store: ObjectStore, objects: Path, tmp_path: Path
) -> None:
    shard = a_shard(end=2)
    writer = open_part(shard, store, tmp_path / "spool")
    for run in (a_run(0, tmp_path / "mapped"), a_run(1, tmp_path / "mapped")):
        writer.add(run.work, run.outcome)
    part = writer.close()
    assert [file.kind for file in part.files] == [
        "results", "activations", "activations", "moments",
    ]  # fmt: skip
    for file in part.files:
        content = (objects / job_key(shard.job_id, file.path)).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file.sha256
        assert len(content) == file.bytes
        assert pq.ParquetFile(objects / job_key(shard.job_id, file.path)).metadata.num_rows == (
            file.rows
        )


def test_a_row_per_choice_with_logprobs_and_sums_that_are_right(
    store: ObjectStore, objects: Path, tmp_path: Path
) -> None:
    shard = a_shard(end=1)
    writer = open_part(shard, store, tmp_path / "spool")
    work, outcome = a_plain_run(0)
    writer.add(work, outcome)
    part = writer.close()
    assert [file.kind for file in part.files] == ["results"]
    table = pq.read_table(objects / job_key(shard.job_id, part.files[0].path))
    assert table.schema.remove_metadata() == RESULTS
    first, second = table.to_pylist()
    assert (first["choice_index"], second["choice_index"]) == (0, 1)
    assert (first["seed"], second["seed"]) == (3, 4)
    assert first["text"] == "Grüße\n"
    assert first["token_ids"] == [7, 8, 9]
    assert first["top_logprobs"][0] == [
        {"token_id": 7, "token": "<7>", "logprob": -0.5},
        {"token_id": 8, "token": "é", "logprob": -1.25},
    ]
    assert first["prompt_logprobs"] == [None, [{"token_id": 2, "token": "b", "logprob": -2.0}]]
    assert sum(row["held_tokens"] for row in (first, second)) == work.spec.tokens_held
    assert first["charged_tokens"] + second["charged_tokens"] == 2 + outcome.completion_tokens


def test_errored_cancelled_and_expired_requests_have_a_row_each(
    store: ObjectStore, objects: Path, tmp_path: Path
) -> None:
    shard = a_shard(end=3)
    writer = open_part(shard, store, tmp_path / "spool")
    works = [a_plain_run(index)[0] for index in range(3)]
    writer.add(works[0], Errored("steering_failed", "It failed."))
    writer.add(works[1], Cancelled())
    writer.add(works[2], Cancelled(), cancelled_as="expired")
    part = writer.close()
    rows = pq.read_table(objects / job_key(shard.job_id, part.files[0].path)).to_pylist()
    assert [row["status"] for row in rows] == ["errored", "cancelled", "expired"]
    assert rows[0]["error_code"] == "steering_failed"
    assert rows[0]["error_message"] == "It failed."
    assert [row["text"] for row in rows] == [None] * 3
    assert [row["charged_tokens"] for row in rows] == [0] * 3


def test_row_groups_are_full_and_pages_carry_checksums(
    store: ObjectStore, objects: Path, tmp_path: Path
) -> None:
    rows = row_group_rows(HIDDEN) // 3 + 1
    shard = a_shard(end=4)
    runs = [a_run(index, tmp_path / "mapped", layers=(2,), rows=rows) for index in range(4)]
    writer = open_part(shard, store, tmp_path / "spool")
    for run in runs:
        writer.add(run.work, run.outcome)
    assert not runs[0].captured_file.exists()  # written and let go while the shard still runs
    assert runs[3].captured_file.exists()
    part = writer.close()
    path = objects / job_key(shard.job_id, part.files[1].path)
    meta = pq.ParquetFile(path).metadata
    groups = [meta.row_group(number).num_rows for number in range(meta.num_row_groups)]
    assert groups == [row_group_rows(HIDDEN), 4 * rows - row_group_rows(HIDDEN)]
    column = meta.row_group(0).column(6)
    assert column.compression == "ZSTD"
    assert "BYTE_STREAM_SPLIT" in column.encodings
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + 5000] ^= 1  # inside the first page
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"(?i)crc"):
        pq.read_table(path, page_checksum_verification=True)


def test_nothing_is_left_in_the_spool_or_of_the_captures(
    store: ObjectStore, objects: Path, tmp_path: Path
) -> None:
    for number, end in enumerate(("close", "abandon")):
        shard = a_shard(end=3)
        runs = [a_run(index, tmp_path / f"mapped-{number}") for index in range(3)]
        writer = open_part(shard, store, tmp_path / "spool")
        writer.add(runs[0].work, runs[0].outcome)
        writer.add(runs[2].work, runs[2].outcome)
        getattr(writer, end)()
        writer.abandon()  # no effect now
        assert everything_in(tmp_path / "spool") == []
        assert [run.captured_file.exists() for run in runs] == [False, True, False]
        with pytest.raises(PartClosedError):
            writer.add(runs[1].work, runs[1].outcome)
        assert not runs[1].captured_file.exists()
        found = [path for path in everything_in(objects) if shard.job_id.hex in str(path)]
        assert bool(found) == (end == "close")


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_a_store_that_refuses_a_file_is_tried_again_until_the_part_is_given_up(
    store: ObjectStore, objects: Path, tmp_path: Path, end: str
) -> None:
    shard = a_shard(end=2)
    run = a_run(0, tmp_path / "mapped")
    writer = open_part(shard, store, tmp_path / "spool")
    writer.add(run.work, run.outcome)
    blocked = objects / job_key(shard.job_id, "activations")
    blocked.parent.mkdir(parents=True)
    blocked.write_bytes(b"a file where a folder must be")
    for _ in range(2):
        with pytest.raises(StoreAwayError, match="activations"):
            writer.close()
    assert everything_in(tmp_path / "spool") != []
    with pytest.raises(PartClosedError):
        writer.add(*a_plain_run(1))
    if end == "abandon":
        before = everything_in(objects)
        writer.abandon()
        assert everything_in(objects) == before, "what it took is an orphan, collected later"
    else:
        blocked.unlink()
        part = writer.close()
        assert sorted(job_key(shard.job_id, file.path) for file in part.files) == sorted(
            str(path.relative_to(objects)) for path in everything_in(objects)
        )
        assert len({file.path for file in part.files}) == len(part.files) > 1
        for file in part.files:
            data = (objects / job_key(shard.job_id, file.path)).read_bytes()
            assert hashlib.sha256(data).hexdigest() == file.sha256
    assert everything_in(tmp_path / "spool") == []
    assert not run.captured_file.exists()
    with pytest.raises(PartClosedError):
        writer.close()


def test_a_file_that_cannot_be_finished_leaves_neither_spool_files_nor_objects(
    store: ObjectStore, objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(0, tmp_path / "mapped")
    writer = open_part(a_shard(end=1), store, tmp_path / "spool")
    writer.add(run.work, run.outcome)

    def full_disk(_file: ParquetFile) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ParquetFile, "finish", full_disk)
    with pytest.raises(OSError, match="No space"):
        writer.close()
    assert everything_in(tmp_path / "spool") == everything_in(objects) == []
    assert not run.captured_file.exists()


def test_a_withdrawn_part_is_gone(store: ObjectStore, objects: Path, tmp_path: Path) -> None:
    writer = open_part(a_shard(end=1), store, tmp_path / "spool")
    writer.add(*a_plain_run(0))
    writer.close()
    assert everything_in(objects) != []
    writer.withdraw()
    assert everything_in(objects) == []


def test_a_cut_part_ends_early_and_drops_what_lies_beyond(
    store: ObjectStore, objects: Path, tmp_path: Path
) -> None:
    shard = a_shard(end=5)
    runs = [a_run(index, tmp_path / "mapped") for index in (0, 1, 3, 4)]
    writer = open_part(shard, store, tmp_path / "spool")
    for run in runs:
        writer.add(run.work, run.outcome)
    with pytest.raises(ValueError, match="are written"):
        writer.cut(1)
    writer.cut(2)
    part = writer.close()
    assert {file.end_index for file in part.files} == {2}
    table = pq.read_table(objects / job_key(shard.job_id, part.files[0].path))
    assert table["request_index"].to_pylist() == [0, 1]
    assert not any(run.captured_file.exists() for run in runs)


def test_waiting_rows_beyond_the_bound_go_to_the_spool_and_come_back_in_order(
    store: ObjectStore, objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "WAITING_BYTES_MAX", 5000)
    shard = a_shard(end=10)
    writer = open_part(shard, store, tmp_path / "spool")
    for index in range(9, 0, -1):
        if index == 5:
            run = a_run(5, tmp_path / "mapped")
            writer.add(run.work, run.outcome)
        else:
            writer.add(*a_plain_run(index, n=1, text=f"text {index}"))
    assert [path for path in everything_in(tmp_path / "spool") if "waiting" in path.name]
    writer.add(*a_plain_run(0, n=1, text="text 0"))
    part = writer.close()
    table = pq.read_table(objects / job_key(shard.job_id, part.files[0].path))
    assert table["text"].to_pylist() == [f"text {index}" for index in range(10)]
    assert len(table["top_logprobs"][9].as_py()) == 3
    assert everything_in(tmp_path / "spool") == []


@pytest.mark.parametrize("index", [0, 3, 9])
def test_a_request_added_twice_or_of_another_range_is_refused(
    store: ObjectStore, tmp_path: Path, index: int
) -> None:
    writer = open_part(a_shard(first=1, end=9), store, tmp_path / "spool")
    writer.add(*a_plain_run(3))
    with pytest.raises(ValueError, match="not of this shard"):
        writer.add(*a_plain_run(index))
    writer.abandon()


def test_named_captures_have_folders_of_their_own(
    store: ObjectStore, objects: Path, tmp_path: Path
) -> None:
    run = a_run(0, tmp_path / "mapped")
    shard = a_shard(end=1)
    part = write_named(run, shard, store, tmp_path)
    file = part.files[1]
    assert (file.kind, file.capture, file.layer) == ("captures", "probe", 1)
    assert file.path == "captures/probe/layer=1/part-0000000.17.parquet"
    table = pq.read_table(objects / job_key(shard.job_id, file.path))
    assert table.column_names[-1] == "activation"


def write_named(run: Ran, shard: LeasedShard, store: ObjectStore, tmp_path: Path) -> PublishedPart:
    """Publish a run whose capture is called `probe`."""
    spec = replace(run.work.spec, captures=(replace(run.work.spec.captures[0], name="probe"),))
    captures = tuple(replace(capture, name="probe") for capture in run.outcome.captures)
    writer = open_part(shard, store, tmp_path / "spool")
    writer.add(replace(run.work, spec=spec), replace(run.outcome, captures=captures))
    return writer.close()
