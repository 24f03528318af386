"""Outcomes that no file can hold error their own request, and nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.steering.spec import Capture, Reduce, Site
from app.storage import ObjectStore, open_store
from tests.results.capture_samples import RAN, Read, a_capture, a_read
from tests.results.samples import a_plain_run, open_part
from tests.results.test_captures import SHARD, table_of
from worker.outcomes import Cancelled, Errored, Outcome, Succeeded


@pytest.fixture
def store(object_store_url: str) -> ObjectStore:
    """An empty store in a folder."""
    return open_store(object_store_url)


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    """The folder behind `store`."""
    return tmp_path / "objects"


def broken(read: Read, **fields: object) -> Succeeded:
    """Change something about the rows of a read."""
    return replace(read.outcome, captures=(replace(read.outcome.captures[0], **fields),))


def outcomes_with_a_misfit() -> dict[str, Succeeded]:
    """Give outcomes of a request that read all rows of layer 1, each wrong in one way."""
    read = a_read(1, [a_capture()])
    rows = read.outcome.captures[0]
    values = rows.layers[1]
    few = np.arange(RAN - 1, dtype=np.int32)
    return {
        "a row missing": broken(read, layers={1: values[1:]}),
        "a position missing": broken(read, positions=few, layers={1: values[1:]}),
        "positions of the wrong kind": broken(read, positions=rows.positions.astype(np.int64)),
        "positions out of order": broken(read, positions=rows.positions[::-1].copy()),
        "another dtype": broken(read, layers={1: values.astype(np.float64)}),
        "another name": broken(read, name="other"),
        "another layer": broken(read, layers={0: values}),
        "another reduce": broken(read, reduce=Reduce.norm),
        "no width": broken(read, layers={1: values[:, :0]}),
        "nothing": replace(read.outcome, captures=()),
        "twice as much": replace(
            read.outcome,
            captures=(rows, replace(rows, name="other", positions=rows.positions)),
        ),
    }


@pytest.mark.parametrize("name", outcomes_with_a_misfit())
def test_rows_that_do_not_add_up_error_their_request_alone(
    store: ObjectStore, objects: Path, tmp_path: Path, name: str
) -> None:
    good = [a_read(0, [a_capture()]), a_read(2, [a_capture()])]
    bad = outcomes_with_a_misfit()[name]
    writer = open_part(SHARD, store, tmp_path / "spool")
    writer.add(good[0].work, good[0].outcome)
    errored = writer.add(a_read(1, [a_capture()]).work, bad)
    assert isinstance(errored, Errored)
    assert errored.code == "activation_rows_mismatch"
    writer.add(good[1].work, good[1].outcome)
    part = writer.close()
    rows = table_of(part, "results", objects)
    assert rows["status"].to_pylist() == ["succeeded", "errored", "succeeded"]
    assert rows["error_message"].to_pylist()[1] == errored.message
    assert table_of(part, "captures", objects)["request_index"].unique().to_pylist() == [0, 2]


def conflicts() -> dict[str, Capture]:
    """Give captures of the name of `a_capture()` that do not fit into its file."""
    return {
        "site": a_capture(site=Site.mlp_out),
        "moment": a_capture(before=True),
        "norm": a_capture(reduce=Reduce.norm),
        "mean": a_capture(reduce=Reduce.mean),
        "project": a_capture(reduce=Reduce.project),
    }


@pytest.mark.parametrize("name", conflicts())
@pytest.mark.parametrize("late", [False, True])
def test_a_capture_of_another_shape_errors_its_request_and_not_the_shard(
    store: ObjectStore, objects: Path, tmp_path: Path, name: str, *, late: bool
) -> None:
    folder = tmp_path / "mapped"
    reads = [
        a_read(0, [a_capture()], folder=folder), a_read(1, [conflicts()[name]], folder=folder),
    ]  # fmt: skip
    writer = open_part(SHARD, store, tmp_path / "spool")
    outcomes: dict[int, Outcome] = {}
    for read in reads[::-1] if late else reads:
        outcomes[read.work.request_index] = writer.add(read.work, read.outcome)
    loser = reads[0 if late else 1]
    refused = outcomes.pop(loser.work.request_index)
    assert isinstance(refused, Errored)
    assert refused.code == "capture_conflict"
    assert "'probe'" in refused.message
    assert all(isinstance(outcome, Succeeded) for outcome in outcomes.values())
    path = loser.outcome.captures[0].path
    assert path is not None
    assert not path.exists()
    part = writer.close()
    assert table_of(part, "captures", objects)["request_index"].unique().to_pylist() == [int(late)]


def test_projections_on_other_directions_share_a_file_but_not_another_number_of_them(
    store: ObjectStore, tmp_path: Path
) -> None:
    writer = open_part(SHARD, store, tmp_path / "spool")
    three = a_capture("p", Reduce.project)
    swapped = replace(three, directions=three.directions[::-1])
    two = a_capture("p", Reduce.project, directions=2)
    raw = replace(three, unit=False)
    kinds = []
    for index, capture in enumerate((three, swapped, two, raw)):
        read = a_read(index, [capture])
        kinds.append(type(writer.add(read.work, read.outcome)))
    writer.abandon()
    assert kinds == [Succeeded, Succeeded, Errored, Errored]


UNWRITABLE = {
    "a lone surrogate": {"text": "half \ud800 a sign"},
    "a token id over 32 bits": {"token_ids": (2**31,)},
    "a token id that is no number": {"token_ids": ("seven",)},
    "a probability that is none": {"token_logprobs": (-0.5, None)},
    "a stop reason of the wrong kind": {"stop_reason": 7},
}


@pytest.mark.parametrize("fields", UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_result_that_parquet_cannot_take_errors_its_request_alone(
    store: ObjectStore, objects: Path, tmp_path: Path, fields: dict[str, object]
) -> None:
    writer = open_part(SHARD, store, tmp_path / "spool")
    for index in range(3):
        work, outcome = a_plain_run(index, n=1)
        if index == 1:
            choice = replace(outcome.choices[0], **fields)  # type: ignore[arg-type]
            refused = writer.add(work, replace(outcome, choices=(choice,)))
            assert isinstance(refused, Errored)
            assert refused.code == "result_not_writable"
        else:
            assert writer.add(work, outcome) is outcome
    rows = table_of(writer.close(), "results", objects).to_pylist()
    assert [row["status"] for row in rows] == ["succeeded", "errored", "succeeded"]
    assert [row["error_code"] for row in rows] == [None, "result_not_writable", None]
    assert rows[1]["text"] is None
    assert [row["charged_tokens"] for row in rows] == [5, 0, 5]


def test_an_error_of_the_engine_is_told_in_words_that_can_be_stored(
    store: ObjectStore, objects: Path, tmp_path: Path
) -> None:
    writer = open_part(SHARD, store, tmp_path / "spool")
    told = writer.add(a_plain_run(0)[0], Errored("engine_error", "a\0b \udcff " + "x" * 9000))
    assert isinstance(told, Errored)
    assert told.message.startswith("a\ufffdb ? xxx")
    assert len(told.message) == 2000
    assert writer.add(a_plain_run(1)[0], Cancelled()) == Cancelled()
    rows = table_of(writer.close(), "results", objects).to_pylist()
    assert rows[0]["error_message"] == told.message
