"""Files of a part as researchers read them: pyarrow, polars and duckdb, in three lines each."""

from pathlib import Path

import duckdb
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow.dataset as ds
import pytest

from app.steering.spec import Reduce
from app.storage import job_folder, open_store
from tests.results.capture_samples import Read, a_capture, a_read, positions_of
from tests.results.samples import HIDDEN, ROWS, a_run, a_shard, open_part

REQUESTS = 6


@pytest.fixture
def folder(object_store_url: str, tmp_path: Path) -> Path:
    """The folder of a Job of six requests in two parts, layers 1 and 3 captured."""
    store = open_store(object_store_url)
    whole = a_shard(end=REQUESTS)
    for first, end in ((0, 2), (2, REQUESTS)):
        shard = a_shard(first, end, job_id=whole.job_id)
        writer = open_part(shard, store, tmp_path / "spool")
        for index in range(first, end):
            run = a_run(index, tmp_path / "mapped")
            writer.add(run.work, run.outcome)
        writer.close()
    return tmp_path / "objects" / job_folder(whole.job_id)


@pytest.fixture
def wanted(tmp_path: Path) -> npt.NDArray[np.float32]:
    """What layer 3 must read as."""
    bits = np.concatenate([a_run(i, tmp_path / "again").bits[3] for i in range(REQUESTS)])
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_pyarrow_reads_one_layer_by_its_folder(
    folder: Path, wanted: npt.NDArray[np.float32]
) -> None:
    data = ds.dataset(folder / "activations", partitioning="hive")
    table = data.to_table(filter=ds.field("layer") == 3)
    values = table["residual"].combine_chunks().flatten().to_numpy().reshape(-1, HIDDEN)
    assert np.array_equal(values.view(np.uint32), wanted.view(np.uint32))
    assert set(table["layer"].to_pylist()) == {3}
    texts = ds.dataset(folder / "results").to_table(columns=["request_index", "text"])
    assert texts["text"].to_pylist() == [f"text {index}" for index in range(REQUESTS)]


def test_polars_reads_one_layer_as_a_matrix(folder: Path, wanted: npt.NDArray[np.float32]) -> None:
    scan = pl.scan_parquet(folder / "activations/**/*.parquet", hive_partitioning=True)
    frame = scan.filter(pl.col("layer") == 3).collect()
    values = frame["residual"].to_numpy()
    assert values.shape == (REQUESTS * ROWS, HIDDEN)
    assert np.array_equal(values.view(np.uint32), wanted.view(np.uint32))
    assert frame["request_index"].is_sorted()
    texts = pl.read_parquet(folder / "results/*.parquet")
    assert texts["text"].to_list() == [f"text {index}" for index in range(REQUESTS)]
    assert texts["token_ids"].dtype == pl.List(pl.Int32)


def test_duckdb_reads_one_layer_and_joins_it_with_texts(
    folder: Path, wanted: npt.NDArray[np.float32]
) -> None:
    rows = duckdb.execute(
        f"""
        SELECT text, position, residual::FLOAT[{HIDDEN}]
        FROM read_parquet('{folder}/activations/*/*.parquet', hive_partitioning = true) AS a
        JOIN read_parquet('{folder}/results/*.parquet') AS r USING (request_index)
        WHERE layer = 3 ORDER BY request_index, position
        """
    ).fetchall()
    assert [row[0] for row in rows[::ROWS]] == [f"text {index}" for index in range(REQUESTS)]
    values = np.array([row[2] for row in rows], dtype=np.float32)
    assert np.array_equal(values.view(np.uint32), wanted.view(np.uint32))


def test_every_captured_request_has_p_plus_g_minus_1_rows_in_every_layer(folder: Path) -> None:
    counts = duckdb.execute(
        f"""
        SELECT layer, request_index, count(*) = any_value(prompt_tokens + completion_tokens - 1),
            any_value(activation_rows) = count(*),
            any_value(list_contains(activation_layers, layer))
        FROM read_parquet('{folder}/activations/*/*.parquet', hive_partitioning = true) AS a
        JOIN read_parquet('{folder}/results/*.parquet') AS r USING (request_index)
        GROUP BY layer, request_index ORDER BY layer, request_index
        """
    ).fetchall()
    assert counts == [
        (layer, index, True, True, True) for layer in (1, 3) for index in range(REQUESTS)
    ]


SPANS = ((0, 2), (5, 8))
DIRECTIONS = 3
CAPTURES = [
    a_capture("rows", spans=SPANS),
    a_capture("mean", Reduce.mean, spans=SPANS),
    a_capture("norm", Reduce.norm, spans=SPANS),
    a_capture("scores", Reduce.project, spans=SPANS, directions=DIRECTIONS),
]
PLACES = [(index, place) for index in range(REQUESTS) for place in positions_of(SPANS)]


@pytest.fixture
def reads() -> list[Read]:
    """Requests that capture in all four ways."""
    return [a_read(index, CAPTURES) for index in range(REQUESTS)]


@pytest.fixture
def named(reads: list[Read], object_store_url: str, tmp_path: Path) -> Path:
    """The folder of captures of a Job in two parts."""
    store = open_store(object_store_url)
    whole = a_shard(end=REQUESTS)
    for first, end in ((0, 4), (4, REQUESTS)):
        writer = open_part(a_shard(first, end, job_id=whole.job_id), store, tmp_path / "spool")
        for read in reads[first:end]:
            writer.add(read.work, read.outcome)
        writer.close()
    return tmp_path / "objects" / job_folder(whole.job_id) / "captures"


def bits_of(reads: list[Read], name: str) -> npt.NDArray[np.uint32]:
    """Give the bits of all rows of a capture."""
    return np.concatenate([read.wanted[name, 1] for read in reads])


def test_polars_reads_every_kind_of_capture(named: Path, reads: list[Read]) -> None:
    def frame(name: str) -> pl.DataFrame:
        return pl.read_parquet(named / name / "**/*.parquet", hive_partitioning=True)

    for name, column in (("rows", "activation"), ("mean", "activation"), ("scores", "projection")):
        values = frame(name)[column].to_numpy()
        assert np.array_equal(values.view(np.uint32), bits_of(reads, name))
    norms = frame("norm")
    assert np.array_equal(norms["norm"].to_numpy().view(np.uint32), bits_of(reads, "norm")[:, 0])
    assert norms.select("request_index", "position").rows() == PLACES
    assert set(norms["layer"]) == {1}
    assert frame("mean")["positions"].to_list() == [len(positions_of(SPANS))] * REQUESTS


def test_duckdb_reads_every_kind_of_capture(named: Path, reads: list[Read]) -> None:
    def values(name: str, column: str, order: str) -> npt.NDArray[np.uint32]:
        source = f"read_parquet('{named}/{name}/*/*.parquet', hive_partitioning = true)"
        query = f"SELECT {column} FROM {source} WHERE layer = 1 ORDER BY {order}"
        rows = np.array([row[0] for row in duckdb.execute(query).fetchall()], dtype=np.float32)
        return rows.view(np.uint32)

    place = "request_index, position"
    scores = values("scores", f"projection::FLOAT[{DIRECTIONS}]", place)
    assert np.array_equal(scores, bits_of(reads, "scores"))
    rows = values("rows", f"activation::FLOAT[{HIDDEN}]", place)
    assert np.array_equal(rows, bits_of(reads, "rows"))
    means = values("mean", f"activation::FLOAT[{HIDDEN}]", "request_index")
    assert np.array_equal(means, bits_of(reads, "mean"))
    assert np.array_equal(values("norm", "norm", place), bits_of(reads, "norm")[:, 0])


def test_pyarrow_reads_one_layer_of_every_kind_of_capture(named: Path, reads: list[Read]) -> None:
    for name, column in (("rows", "activation"), ("mean", "activation"), ("scores", "projection")):
        table = ds.dataset(named / name, partitioning="hive").to_table()
        width = table.schema.field(column).type.list_size
        values = table[column].combine_chunks().flatten().to_numpy().reshape(-1, width)
        assert np.array_equal(values.view(np.uint32), bits_of(reads, name))
    table = ds.dataset(named / "norm", partitioning="hive").to_table()
    assert list(
        zip(*(table[c].to_pylist() for c in ("request_index", "position")), strict=True)
    ) == (PLACES)
