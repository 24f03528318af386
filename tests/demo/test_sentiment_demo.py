"""The demo as a newcomer runs it: a service of its own, two Jobs, files that any reader opens."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import psutil
import pyarrow.dataset as ds
import pytest

PROMPTS = ["I think that this movie is", "The food at this restaurant was"]
SECONDS_MAX = 420


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
    """Run the demo on two prompts; give its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    out, data = folder / "out", folder / "data"
    command = [sys.executable, "-m", "examples.sentiment", "--out", str(out), "--data", str(data)]
    done = subprocess.run(
        [*command, "--prompts", str(prompts)],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    left = [p for p in psutil.process_iter(["cmdline"]) if str(data) in " ".join(_words(p))]
    assert not left, left
    return out, done.stdout


def test_demo_ends_with_a_line_about_requests_and_tokens(demo):
    _, printed = demo
    last = printed.strip().splitlines()[-1]
    assert last.startswith(f"{24 + 9 * len(PROMPTS)} requests; tokens held "), last
    assert last.endswith("tokens/s"), last


def test_demo_leaves_texts_and_a_plot(demo):
    out, _ = demo
    assert (out / "sentiment.png").stat().st_size > 5_000
    lines = (out / "texts.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 3 * len(PROMPTS)
    frame = pl.read_csv(out / "texts.csv")
    means = frame.group_by("strength").agg(pl.col("score").mean()).sort("strength")["score"]
    assert means.to_list() == sorted(set(means.to_list())), "minus < zero < plus"


@pytest.mark.parametrize("job", ["derive", "steer"])
def test_three_readers_agree_on_texts_and_activations(demo, job):
    folder = demo[0] / job
    table = ds.dataset(folder / "results").to_table(columns=["request_index", "text"])
    frame = pl.read_parquet(folder / "results" / "*.parquet", columns=["request_index", "text"])
    sql = f"select request_index, text from '{folder}/results/*.parquet' order by 1"  # noqa: S608
    rows = duckdb.sql(sql).fetchall()
    assert sorted(zip(*table.to_pydict().values(), strict=True)) == rows
    assert sorted(frame.rows()) == rows

    arrow = ds.dataset(folder / "activations", partitioning="hive").to_table()
    width = arrow.schema.field("residual").type.list_size
    vectors = arrow["residual"].combine_chunks().flatten().to_numpy().reshape(-1, width)
    lazy = pl.scan_parquet(folder / "activations" / "**" / "*.parquet", hive_partitioning=True)
    assert np.array_equal(lazy.collect()["residual"].to_numpy(), vectors)
    sql = f"select residual::FLOAT[{width}] v from '{folder}/activations/layer=22/*.parquet'"  # noqa: S608
    by_duckdb = np.stack(duckdb.sql(sql).fetchnumpy()["v"])
    assert np.array_equal(by_duckdb, vectors)
    assert np.isfinite(vectors).all()
    assert vectors.any(axis=1).all()


@pytest.mark.parametrize("job", ["derive", "steer"])
def test_every_request_has_prompt_plus_generated_minus_one_rows(demo, job):
    folder = demo[0] / job
    columns = ["request_index", "prompt_tokens", "completion_tokens"]
    texts = pl.read_parquet(folder / "results" / "*.parquet", columns=columns)
    rows = pl.scan_parquet(folder / "activations" / "**" / "*.parquet", hive_partitioning=True)
    counted = rows.group_by("request_index").agg(pl.len().alias("rows")).collect()
    joined = texts.join(counted, on="request_index", how="left")
    assert joined.height == texts.height
    wanted = joined["prompt_tokens"] + joined["completion_tokens"] - 1
    assert (joined["rows"] == wanted).all()


@pytest.mark.parametrize("job", ["derive", "steer"])
def test_every_file_has_the_checksum_of_the_manifest(demo, job):
    folder = demo[0] / job
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["complete"] is True
    assert manifest["files"]
    for entry in manifest["files"]:
        assert _sha256(folder / entry["path"]) == entry["sha256"], entry["path"]
    present = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert present == {e["path"] for e in manifest["files"]} | {"manifest.json", "SHA256SUMS"}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _words(process: psutil.Process) -> list[str]:
    return process.info["cmdline"] or []
