"""Captures of a downloaded Job as arrays, by name and layer."""

from pathlib import Path

import numpy as np
import pytest

from app.steering.spec import Reduce
from app.storage import job_folder, open_store
from tests.results.capture_samples import RAN, Read, a_capture, a_read
from tests.results.samples import HIDDEN, a_shard, open_part
from tiller import NoSuchCaptureError, list_captures, read_capture

REQUESTS = 5
CAPTURES = [
    a_capture("residual_stream", layers=(0, 3)),
    a_capture("rows", spans=((2, 4),)),
    a_capture("norms", Reduce.norm),
    a_capture("scores", Reduce.project, layers=(2,)),
    a_capture("means", Reduce.mean, spans=((2, 4),)),
]


@pytest.fixture
def reads() -> list[Read]:
    """Five requests with every kind of capture."""
    return [a_read(index, CAPTURES) for index in range(REQUESTS)]


@pytest.fixture
def folder(tmp_path: Path, reads: list[Read]) -> Path:
    """The folder of a Job in three parts, as a download leaves it."""
    store = open_store((tmp_path / "objects").as_uri())
    job = a_shard().job_id
    for first, end in ((0, 2), (2, 3), (3, REQUESTS)):
        writer = open_part(a_shard(first, end, job_id=job), store, tmp_path / "spool")
        for read in reads[first:end]:
            writer.add(read.work, read.outcome)
        writer.close()
    return tmp_path / "objects" / job_folder(job)


def test_captures_and_their_layers_are_listed(folder: Path, tmp_path: Path) -> None:
    assert list_captures(folder) == {
        "residual_stream": [0, 3], "means": [1], "norms": [1], "rows": [1], "scores": [2],
    }  # fmt: skip
    assert list_captures(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("name", "layer", "shape"),
    [
        ("residual_stream", 3, (REQUESTS * RAN, HIDDEN)),
        ("rows", 1, (REQUESTS * 2, HIDDEN)),
        ("norms", 1, (REQUESTS * RAN,)),
        ("scores", 2, (REQUESTS * RAN, 3)),
        ("means", 1, (REQUESTS, HIDDEN)),
    ],
)
def test_values_are_those_captured_with_their_places(
    folder: Path, reads: list[Read], name: str, layer: int, shape: tuple[int, ...]
) -> None:
    rows = read_capture(folder, layer, name=name)
    assert rows.values.shape == shape
    wanted = np.concatenate([read.wanted[name, layer] for read in reads])
    assert np.array_equal(rows.values.view(np.uint32), wanted.reshape(shape))
    indices = rows.places["request_index"].to_pylist()
    assert indices == sorted(indices)
    assert ("positions" if name == "means" else "position") in rows.places.column_names


def test_some_requests_can_be_read_alone(folder: Path, reads: list[Read]) -> None:
    rows = read_capture(folder, 1, name="norms", request_indices=[4, 1])
    wanted = np.concatenate([reads[index].wanted["norms", 1] for index in (1, 4)])
    assert np.array_equal(rows.values.view(np.uint32), wanted[:, 0])
    assert read_capture(folder, 1, name="means", request_indices=[]).values.shape == (0, HIDDEN)


def test_what_is_not_there_is_refused_with_the_list_of_what_is(folder: Path) -> None:
    for layer, name in ((1, "residual_stream"), (2, "rows"), (1, "nothing")):
        with pytest.raises(NoSuchCaptureError, match=r"residual_stream at \[0, 3\]"):
            read_capture(folder, layer, name=name)
