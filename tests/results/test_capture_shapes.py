"""One name, one kind of read in a Job; and how many bytes of a part each kind is counted at."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.catalog import ServedModel, load_catalog
from app.jobs.capture_shapes import CaptureNames
from app.jobs.shards import size_of
from app.steering.spec import Capture, Reduce, Site
from app.storage import open_store
from tests.fixtures.tiny_model import write_tiny_model
from tests.results.capture_samples import a_capture, a_read
from tests.results.samples import a_shard, open_part


def test_a_name_may_change_positions_layers_and_directions_between_requests() -> None:
    names = CaptureNames()
    project = a_capture("p", Reduce.project)
    assert names.problems(0, [a_capture(), project]) == []
    again = [
        a_capture(spans=((1, 2),), layers=(0, 3)),
        replace(project, directions=project.directions[::-1]),
        a_capture("another", Reduce.norm),
    ]
    assert names.problems(7, again) == []


@pytest.mark.parametrize(
    "other",
    [
        a_capture(site=Site.z),
        a_capture(before=True),
        a_capture(reduce=Reduce.mean),
        a_capture(reduce=Reduce.norm),
        a_capture(reduce=Reduce.project),
    ],
    ids=["site", "when", "mean", "norm", "project"],
)
def test_a_name_that_reads_something_else_is_refused_with_both_requests(other: Capture) -> None:
    names = CaptureNames()
    assert names.problems(3, [a_capture()]) == []
    assert names.problems(4, []) == []
    (problem,) = names.problems(5, [a_capture("fine"), other])
    assert (problem.param, problem.code) == ("captures", "capture_conflict")
    assert "'probe'" in problem.message
    assert "requests[3]" in problem.message
    assert "the rows of resid_post after all ops" in problem.message


def test_another_number_of_directions_or_their_length_is_refused() -> None:
    names = CaptureNames()
    three = a_capture("p", Reduce.project, directions=3)
    names.problems(0, [three])
    (fewer,) = names.problems(1, [a_capture("p", Reduce.project, directions=2)])
    assert "2 projections (unit) of resid_post after all ops here, but 3" in fewer.message
    assert len(names.problems(2, [replace(three, unit=False)])) == 1


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    """A small model."""
    return load_catalog(write_tiny_model(tmp_path)).get("tiny")


KINDS = {
    "rows": a_capture(layers=(0, 1, 2)),
    "norms": a_capture(reduce=Reduce.norm, layers=(0, 1, 2)),
    "projections": a_capture(reduce=Reduce.project, directions=40),
    "means": a_capture(reduce=Reduce.mean, layers=(0, 1)),
    "one position": a_capture(spans=((3, 4),)),
    "nothing": a_capture(spans=()),
}


@pytest.mark.parametrize("capture", KINDS.values(), ids=KINDS)
def test_a_part_is_about_as_big_as_it_was_counted(
    model: ServedModel, tmp_path: Path, capture: Capture
) -> None:
    store = open_store((tmp_path / "objects").as_uri())
    requests = 300
    writer = open_part(a_shard(end=requests), store, tmp_path / "spool")
    counted = 0
    for index in range(requests):
        read = a_read(index, [capture], prompt=40, generated=11, dtype="float32")
        writer.add(read.work, read.outcome)
        without = replace(read.work.spec, captures=())
        wide = replace(model, hidden_size=32, dtype="float32")
        counted += size_of(read.work.spec, wide).part_bytes - size_of(without, wide).part_bytes
    files = [file for file in writer.close().files if file.kind == "captures"]
    real = sum(file.bytes for file in files)
    overhead = 6000 * len(files)  # the footer
    assert real <= 1.3 * counted + overhead
    assert counted <= 2.0 * real
