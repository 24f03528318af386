"""Captures of every kind in files: columns, flags, footers, statistics."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.jobs.records import PublishedPart
from app.results.schema import RESULTS, activations_schema
from app.steering.spec import FOREVER, Intervention, Op, Reduce, Site
from app.storage import ObjectStore, job_key, open_store
from tests.results.capture_samples import (
    GENERATED,
    NAME,
    PROMPT,
    RAN,
    Read,
    a_capture,
    a_read,
    as_float32_bits,
    positions_of,
)
from tests.results.samples import HIDDEN, a_plain_run, a_shard, open_part
from worker import part_captures, part_writer
from worker.outcomes import CaptureRows

SHARD = a_shard(end=40)


@pytest.fixture
def store(object_store_url: str) -> ObjectStore:
    """An empty store in a folder."""
    return open_store(object_store_url)


@pytest.fixture
def publish(store: ObjectStore, tmp_path: Path) -> Callable[[Sequence[Read]], PublishedPart]:
    """A function that publishes reads as one part."""

    def publish(reads: Sequence[Read]) -> PublishedPart:
        writer = open_part(SHARD, store, tmp_path / "spool")
        for read in reads:
            assert writer.add(read.work, read.outcome) is read.outcome
        return writer.close()

    return publish


Publish = Callable[[Sequence[Read]], PublishedPart]


def table_of(part: PublishedPart, kind: str, objects: Path, layer: int | None = None) -> pa.Table:
    """Read the file of a kind."""
    (file,) = (f for f in part.files if f.kind == kind and layer in (None, f.layer))
    return pq.read_table(objects / job_key(SHARD.job_id, file.path))


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    """The folder behind `store`."""
    return tmp_path / "objects"


def test_rows_of_a_sparse_read_say_their_position_and_token(
    publish: Publish, objects: Path
) -> None:
    spans = ((1, 2), (4, 7), (8, FOREVER))
    read = a_read(0, [a_capture(spans=spans)])
    table = table_of(publish([read]), "captures", objects)
    places = positions_of(spans)
    tokens = (*read.work.spec.prompt_token_ids, *read.outcome.choices[0].token_ids)
    assert places == [1, 4, 5, 6, 8]
    assert table["position"].to_pylist() == places
    assert table["token_id"].to_pylist() == [tokens[position] for position in places]
    assert table["is_generated"].to_pylist() == [position >= PROMPT for position in places]
    values = table["activation"].combine_chunks().flatten().to_numpy().reshape(-1, HIDDEN)
    assert np.array_equal(values.view(np.uint32), read.wanted["probe", 1])


def test_a_norm_is_a_number_and_a_projection_a_list_of_its_directions(
    publish: Publish, objects: Path
) -> None:
    reads = [a_read(index, [a_capture("n", Reduce.norm)]) for index in range(2)]
    table = table_of(publish(reads), "captures", objects)
    assert table.schema.field("norm").type == pa.float32()
    bits = np.concatenate([read.wanted["n", 1][:, 0] for read in reads])
    assert np.array_equal(table["norm"].to_numpy().view(np.uint32), bits)
    assert table["position"].to_pylist() == [*range(RAN)] * 2
    projected = a_read(0, [a_capture("p", Reduce.project, directions=5, site=Site.z)])
    table = table_of(publish([projected]), "captures", objects)
    element = pa.field("element", pa.float32(), nullable=False)
    assert table.schema.field("projection").type == pa.list_(element, 5)
    values = table["projection"].combine_chunks().flatten().to_numpy().reshape(-1, 5)
    assert np.array_equal(values.view(np.uint32), projected.wanted["p", 1])


def test_a_mean_is_one_row_that_counts_its_positions_and_nothing_read_is_no_row(
    publish: Publish, objects: Path
) -> None:
    spans = (((2, 5),), (), ((7, FOREVER),), ((RAN, FOREVER),))
    reads = [
        a_read(index, [a_capture("m", Reduce.mean, spans=item)]) for index, item in enumerate(spans)
    ]
    table = table_of(publish(reads), "captures", objects)
    assert table.column_names == ["request_index", "custom_id", "positions", "activation"]
    assert table["request_index"].to_pylist() == [0, 2]
    assert table["custom_id"].to_pylist() == ["c-0", "c-2"]
    assert table["positions"].to_pylist() == [3, 2]
    values = table["activation"].combine_chunks().flatten().to_numpy().reshape(-1, HIDDEN)
    bits = np.concatenate([reads[0].wanted["m", 1], reads[2].wanted["m", 1]])
    assert np.array_equal(values.view(np.uint32), bits)


def an_op(op: Op = Op.add, **fields: object) -> Intervention:
    """Describe an intervention at layer 1, resid_post."""
    asked = {"site": Site.resid_post, "layer": 1, "vector": NAME, "row": 0, **fields}
    return Intervention(op, **asked)  # type: ignore[arg-type]


STEERED: dict[str, tuple[Intervention, list[int]]] = {
    "everywhere": (an_op(), [*range(RAN)]),
    "spans": (an_op(spans=((1, 3), (7, FOREVER))), [1, 2, 7, 8]),
    "beyond the end": (an_op(spans=((RAN, FOREVER),)), []),
    "positions": (an_op(positions=(4, 2, 2, 900)), [2, 4]),
    "scale 0": (an_op(scale=0.0), []),
    "no position": (an_op(spans=()), []),
    "coeff 1": (an_op(Op.orthogonal, coeff=1.0), []),
    "coeff 0": (an_op(Op.orthogonal, coeff=0.0), [*range(RAN)]),
    "cap": (an_op(Op.cap, high=1.0, spans=((0, 2),)), [0, 1]),
    "replace": (an_op(Op.replace, positions=(3,)), [3]),
    "another layer": (an_op(layer=0), []),
    "another site": (an_op(site=Site.mlp_out), []),
}


@pytest.mark.parametrize(("op", "wanted"), STEERED.values(), ids=STEERED)
def test_a_row_is_steered_where_something_acts_on_its_place(
    publish: Publish, objects: Path, op: Intervention, wanted: list[int]
) -> None:
    read = a_read(0, [a_capture()], interventions=(op,))
    table = table_of(publish([read]), "captures", objects)
    assert [p for p, steered in enumerate(table["steered"].to_pylist()) if steered] == wanted


def test_several_ops_add_up_and_one_head_steers_the_position(
    publish: Publish, objects: Path
) -> None:
    ops = (
        an_op(site=Site.z, heads=(1,), spans=((1, 2),)),
        an_op(site=Site.z, heads=(), spans=((4, 5),)),
        an_op(site=Site.z, positions=(6,)),
    )
    read = a_read(0, [a_capture(site=Site.z, spans=((1, 7),))], interventions=ops)
    table = table_of(publish([read]), "captures", objects)
    steered = table.filter(table["steered"])["position"].to_pylist()
    assert steered == [1, 6]


def test_what_is_read_before_all_ops_is_not_steered(publish: Publish, objects: Path) -> None:
    captures = [a_capture("after"), a_capture("before", before=True)]
    part = publish([a_read(0, captures, interventions=(an_op(),))])
    flags = {
        file.capture: pq.read_table(objects / job_key(SHARD.job_id, file.path))["steered"]
        for file in part.files
        if file.kind == "captures"
    }
    assert all(flags["after"].to_pylist())
    assert not any(flags["before"].to_pylist())


def test_files_say_in_footer_and_record_what_they_were_read_from(
    publish: Publish, objects: Path
) -> None:
    captures = [
        a_capture("residual_stream"),
        a_capture("p", Reduce.project, site=Site.attn_out, before=True, layers=(0, 2), unit=False),
    ]
    part = publish([a_read(0, captures)])
    found = [(f.kind, f.capture, f.layer, f.site, f.before, f.reduce, f.width) for f in part.files]
    assert found == [
        ("results", None, None, None, None, None, None),
        ("captures", "p", 0, "attn_out", True, "project", 3),
        ("captures", "p", 2, "attn_out", True, "project", 3),
        ("activations", None, 1, "resid_post", False, "none", HIDDEN),
        ("moments", None, None, None, None, None, None),
    ]
    footers = [
        pq.read_metadata(objects / job_key(SHARD.job_id, file.path)).metadata
        for file in part.files[1:4]
    ]
    keys = (b"capture", b"layer", b"site", b"when", b"reduce", b"width", b"source_dtype")
    assert [tuple(footer[key].decode() for key in keys) for footer in footers] == [
        ("p", "0", "attn_out", "before", "project", "3", "bfloat16"),
        ("p", "2", "attn_out", "before", "project", "3", "bfloat16"),
        ("residual_stream", "1", "resid_post", "after", "none", str(HIDDEN), "bfloat16"),
    ]
    assert [footer.get(b"unit") for footer in footers] == [b"false", b"false", None]
    assert [b"exact" in footer for footer in footers] == [False, False, True]


def test_the_results_row_says_what_was_read(publish: Publish, objects: Path) -> None:
    reads = [
        a_read(0, [a_capture("residual_stream"), a_capture("n", Reduce.norm)]),
        a_read(1, [a_capture("n", Reduce.norm, spans=())]),
    ]
    first, second = table_of(publish(reads), "results", objects).to_pylist()
    assert first["captures"] == (
        '[{"name":"residual_stream","site":"resid_post","layers":[1]},'
        '{"name":"n","site":"resid_post","layers":[1],"reduce":"norm"}]'
    )
    assert (first["activation_layers"], first["activation_rows"]) == ([1], RAN)
    assert (second["activation_layers"], second["activation_rows"]) == (None, None)


def test_statistics_are_of_the_values_in_the_files(publish: Publish, objects: Path) -> None:
    spans = ((0, 4),)
    captures = [
        a_capture("rows", spans=spans),
        a_capture("means", Reduce.mean, spans=spans),
        a_capture("norms", Reduce.norm, spans=spans),
        a_capture("scores", Reduce.project, spans=spans),
    ]
    reads = [a_read(index, captures) for index in range(3)]
    rng = np.random.default_rng(5)
    for read in reads:  # numbers of an ordinary size
        for rows in read.outcome.captures:
            values = rows.layers[1]
            drawn = rng.standard_normal(values.shape).astype(np.float32)
            values[:] = drawn.view(np.uint32) >> 16 if values.dtype == np.uint16 else drawn
    part = publish(reads)
    moments = {row["capture"]: row for row in table_of(part, "moments", objects).to_pylist()}
    for number, (name, skipped) in enumerate(
        (("rows", 1), ("means", 0), ("norms", 1), ("scores", 1))
    ):
        bits = [as_float32_bits(read.outcome.captures[number].layers[1]) for read in reads]
        values = np.concatenate([item[skipped:].view(np.float32) for item in bits])
        exact = values.astype(np.float64)
        row = moments[name]
        assert row["count"] == len(exact) > 0
        np.testing.assert_allclose(row["mean"], exact.mean(axis=0), rtol=1e-9)
        np.testing.assert_allclose(row["m2"], exact.var(axis=0) * len(exact), rtol=1e-9)
        norms = np.linalg.norm(exact, axis=1)
        np.testing.assert_allclose(row["norm_sum"], norms.sum(), rtol=1e-9)


def test_rows_that_came_in_memory_wait_in_a_file(
    store: ObjectStore, objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_captures, "KEPT_BYTES_MAX", 2 * HIDDEN * RAN)
    captures = [
        a_capture(), a_capture("n", Reduce.norm), a_capture("none", Reduce.mean, spans=()),
    ]  # fmt: skip
    small, big = a_read(2, captures[1:]), a_read(1, captures)
    writer = open_part(SHARD, store, tmp_path / "spool")
    for read in (small, big):
        writer.add(read.work, read.outcome)
    waiting = [path.name for path in (tmp_path / "spool").rglob("captured-*")]
    assert waiting == ["captured-1"]
    first = a_plain_run(0)
    writer.add(*first)
    part = writer.close()
    for name, column in (("probe", "activation"), ("n", "norm")):
        (file,) = (file for file in part.files if file.capture == name)
        table = pq.read_table(objects / job_key(SHARD.job_id, file.path))
        values = table[column].combine_chunks()
        numbers = (values if column == "norm" else values.flatten()).to_numpy()
        wanted = [read.wanted[name, 1] for read in (big, small) if (name, 1) in read.wanted]
        assert np.array_equal(numbers.view(np.uint32), np.concatenate(wanted).reshape(-1))
    assert not list((tmp_path / "spool").rglob("captured-*"))


def test_the_file_behind_a_mean_goes_as_soon_as_the_mean_is_there(
    store: ObjectStore, tmp_path: Path
) -> None:
    read = a_read(5, [a_capture("m", Reduce.mean), a_capture("rows")], folder=tmp_path / "mapped")
    mean, rows = read.outcome.captures
    taken = replace(mean, layers={1: np.array(mean.layers[1])})
    assert mean.path is not None
    assert rows.path is not None
    writer = open_part(SHARD, store, tmp_path / "spool")
    writer.add(read.work, replace(read.outcome, captures=(taken, rows)))
    assert not mean.path.exists()
    assert rows.path.exists()
    writer.abandon()
    assert not rows.path.exists()


def test_a_capture_that_read_nothing_keeps_no_file_of_its_request(
    publish: Publish, tmp_path: Path
) -> None:
    captures = [a_capture("something"), a_capture("nothing", spans=())]
    reads = [a_read(index, captures, folder=tmp_path / "mapped") for index in range(2)]
    assert list((tmp_path / "mapped").iterdir())
    part = publish(reads)
    assert {file.capture: file.rows for file in part.files if file.kind == "captures"} == {
        "something": 2 * RAN, "nothing": 0,
    }  # fmt: skip
    assert not list((tmp_path / "mapped").iterdir())


def test_many_files_of_a_part_are_not_open_at_once(store: ObjectStore, tmp_path: Path) -> None:
    captures = [a_capture(f"c{number}", layers=tuple(range(4))) for number in range(16)]
    writer = open_part(SHARD, store, tmp_path / "spool")
    before = len(list(Path("/proc/self/fd").iterdir()))
    read = a_read(0, captures)
    writer.add(read.work, read.outcome)
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 16
    part = writer.close()
    assert sum(file.kind == "captures" for file in part.files) == 64
    assert {file.rows for file in part.files if file.kind == "captures"} == {PROMPT + GENERATED - 1}


def test_rows_in_another_order_than_asked_are_still_named_right(
    publish: Publish, objects: Path
) -> None:
    read = a_read(0, [a_capture("a"), a_capture("b", Reduce.norm)])
    turned: tuple[CaptureRows, ...] = read.outcome.captures[::-1]
    part = publish([replace(read, outcome=replace(read.outcome, captures=turned))])
    names = {file.capture: file.reduce for file in part.files if file.kind == "captures"}
    assert names == {"a": "none", "b": "norm"}
    assert table_of(part, "results", objects)["status"].to_pylist() == ["succeeded"]


def test_a_capture_may_be_called_like_the_part_writers_own_files(
    publish: Publish, objects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "WAITING_BYTES_MAX", 0)
    monkeypatch.setattr(part_captures, "KEPT_BYTES_MAX", 0)
    names = ("waiting", "captured", "results", "moments")
    reads = [a_read(index, [a_capture(name) for name in names]) for index in (1, 0)]
    part = publish(reads)
    for file in part.files:
        if file.kind == "captures":
            table = pq.read_table(objects / job_key(SHARD.job_id, file.path))
            values = table["activation"].combine_chunks().flatten().to_numpy()
            assert file.capture is not None
            wanted = np.concatenate([read.wanted[file.capture, 1] for read in reversed(reads)])
            assert np.array_equal(values.view(np.uint32), wanted.reshape(-1))
    assert {file.capture for file in part.files} == {*names, None}


def test_every_column_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/results.md").read_text(encoding="utf-8")
    told = {
        name.strip()
        for line in page.splitlines()
        if line.startswith("| ")
        for name in line.split("|")[1].split(",")
    }
    assert set(RESULTS.names) - told == set()
    for reduce in Reduce:
        for name in activations_schema("probe", 3, reduce).names:
            assert name in told or f"`{name}`" in page, name
