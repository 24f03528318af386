"""Whatever was captured comes back bit for bit: any positions, reduction, dtype, in any order."""

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.results import schema
from app.steering.spec import FOREVER, Capture, Reduce, Spans
from app.storage import job_folder, open_store
from tests.results.capture_samples import Read, a_capture, a_read, positions_of
from tests.results.samples import a_shard, open_part
from worker import part_captures

COLUMNS = {
    Reduce.none: "activation", Reduce.mean: "activation", Reduce.norm: "norm",
    Reduce.project: "projection",
}  # fmt: skip


@st.composite
def some_spans(draw: st.DrawFn) -> Spans | None:
    """Draw spans: all positions, none, or a few ranges, the last one perhaps open."""
    if draw(st.booleans()):
        return None
    edges = sorted(draw(st.sets(st.integers(0, 14), max_size=6)))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    if len(edges) % 2:
        spans.append((edges[-1], FOREVER))
    return tuple(spans)


@st.composite
def some_requests(draw: st.DrawFn) -> tuple[list[dict[str, Any]], str]:
    """Draw what requests of a Job ask for; a name stands for one kind of read in all of them."""
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    kinds = {name: draw(st.sampled_from(list(Reduce))) for name in names}
    directions = {name: draw(st.integers(1, 5)) for name in names}
    requests = []
    for _ in range(draw(st.integers(1, 7))):
        captures = [
            a_capture(
                name,
                kinds[name],
                directions=directions[name],
                spans=draw(some_spans()),
                layers=tuple(sorted(draw(st.sets(st.integers(0, 2), min_size=1)))),
            )
            for name in names
            if draw(st.booleans())
        ]
        asked = {"captures": captures, "prompt": draw(st.integers(1, 6))}
        requests.append({**asked, "generated": draw(st.integers(1, 5))})
    return requests, draw(st.sampled_from(["bfloat16", "float32"]))


@given(
    drawn=some_requests(),
    cuts=st.sets(st.integers(1, 6)),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**32),
    tiny=st.booleans(),
    mapped=st.booleans(),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_was_captured_comes_back_bit_for_bit(
    drawn: tuple[list[dict[str, Any]], str],
    cuts: set[int],
    order: Any,
    seed: int,
    *,
    tiny: bool,
    mapped: bool,
) -> None:
    requests, dtype = drawn
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reads = [
            a_read(
                index, asked["captures"], seed=seed, dtype=dtype, prompt=asked["prompt"],
                generated=asked["generated"], folder=folder / "mapped" if mapped else None,
            )
            for index, asked in enumerate(requests)
        ]  # fmt: skip
        before = (schema.ROW_GROUP_ROWS_MAX, part_captures.KEPT_BYTES_MAX)
        try:
            if tiny:  # groups that cut requests in two, rows that wait in files
                schema.ROW_GROUP_ROWS_MAX, part_captures.KEPT_BYTES_MAX = 3, 64  # type: ignore[misc]
            job = _publish(reads, sorted(cuts), order, folder)
        finally:
            schema.ROW_GROUP_ROWS_MAX, part_captures.KEPT_BYTES_MAX = before  # type: ignore[misc]
        assert not [path for path in (folder / "spool").rglob("*") if path.is_file()]
        assert not list((folder / "mapped").glob("*"))
        _compare(reads, job)


def _publish(reads: Sequence[Read], cuts: Sequence[int], order: Any, folder: Path) -> Path:
    """Publish reads as parts that end at `cuts`, each in an order of its own; give their folder."""
    store = open_store((folder / "objects").as_uri())
    whole = a_shard(end=len(reads))
    edges = [0, *(cut for cut in cuts if cut < len(reads)), len(reads)]
    for first, end in pairwise(edges):
        part = list(reads[first:end])
        order.shuffle(part)
        writer = open_part(a_shard(first, end, job_id=whole.job_id), store, folder / "spool")
        for read in part:
            assert writer.add(read.work, read.outcome) is read.outcome
        writer.close()
    return folder / "objects" / job_folder(whole.job_id)


def _compare(reads: Sequence[Read], job: Path) -> None:
    for name, layer in sorted({key for read in reads for key in read.wanted}):
        asking = [read for read in reads if (name, layer) in read.wanted]
        captures = [_capture(read, name) for read in asking]
        table = ds.dataset(job / f"captures/{name}/layer={layer}").to_table()
        wanted = np.concatenate([read.wanted[name, layer] for read in asking])
        column = table[COLUMNS[captures[0].reduce]].combine_chunks()
        assert np.array_equal(_bits(column), wanted.reshape(-1)), (name, layer)
        places = [
            (read.work.request_index, position)
            for read, capture in zip(asking, captures, strict=True)
            for position in positions_of(capture.spans, _ran(read))
        ]
        index = table["request_index"].to_pylist()
        if captures[0].reduce is Reduce.mean:
            counts = dict(zip(index, table["positions"].to_pylist(), strict=True))
            assert [pair[0] for pair in places] == [i for i in index for _ in range(counts[i])]
        else:
            assert places == list(zip(index, table["position"].to_pylist(), strict=True))


def _capture(read: Read, name: str) -> Capture:
    return next(capture for capture in read.work.spec.captures if capture.name == name)


def _ran(read: Read) -> int:
    return read.work.spec.prompt_tokens + len(read.outcome.choices[0].token_ids) - 1


def _bits(column: pa.Array) -> npt.NDArray[np.uint32]:
    numbers = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
    bits: npt.NDArray[np.uint32] = numbers.to_numpy(zero_copy_only=False).view(np.uint32)
    return bits
