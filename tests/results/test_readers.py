"""Files of a part as researchers read them: pyarrow, polars and duckdb, in three lines each."""

from pathlib import Path

import duckdb
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow.dataset as ds
import pytest

from app.storage import job_folder, open_store
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
