"""Rows of a finished request, read back out of its parts: exact, together, or a reason why not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from app.completions.rows_of import RowsOf
from app.errors import InvalidRequestError
from app.jobs.claims import finish_shard
from app.jobs.records import Job, RequestResult
from app.jobs.states import RequestState
from app.kit.db import Database
from app.kit.ids import new_uuid
from app.results import captured as captured_module
from app.results.captured import CapturedLimits, CapturedRows
from app.results.schema import row_group_rows
from app.steering.spec import Capture, Reduce, Site
from app.steering.vectors import Vector
from app.storage import ObjectStore, open_store
from tests.fixtures.builders import Builders, errored
from tests.fixtures.parts import named_part
from tests.results.capture_samples import RAN, Read, a_capture, a_read
from tests.results.samples import HIDDEN, open_part

STREAM = Capture("residual_stream", Site.resid_post, (1, 3))


@dataclass
class Study:
    """A Job that ran, with the rows that it captured, and a reader of them."""

    database: Database
    builders: Builders
    store: ObjectStore
    spool: Path

    def run(self, reads: Sequence[Read], *, shard_size: int = 2, shards: int | None = None) -> Job:
        """Store a Job of these requests and publish its shards (all, or some)."""
        specs = [read.work.spec for read in reads]
        job = self.builders.a_job(specs=specs, shard_size=shard_size)
        count = -(-len(reads) // shard_size) if shards is None else shards
        for _ in range(count):
            shard = self.builders.a_lease()
            writer = open_part(shard, self.store, self.spool)
            results = []
            for index in range(shard.first_index, shard.end_index):
                writer.add(reads[index].work, reads[index].outcome)
                tokens = reads[index].outcome.completion_tokens
                result = RequestResult(
                    request_index=index, state=RequestState.succeeded, completion_tokens=tokens
                )
                results.append(result)
            part = writer.close()
            done = self.database.run(
                lambda conn, s=shard, r=results, p=part: finish_shard(conn, s, r, p)  # type: ignore[misc]
            )
            assert done
        return job

    def read(
        self,
        account_id: UUID,
        *refs: RowsOf,
        bytes_max: int = 2**28,
        jobs_max: int = 100,
        is_job: bool = True,
    ) -> dict[RowsOf, Vector | str]:
        """Read references for an account."""
        limits = CapturedLimits(bytes_max, jobs_max, is_job=is_job)
        return CapturedRows(self.database, self.store, limits).read(account_id, refs)

    def refused(self, job: Job, ref: RowsOf) -> str:
        """Read one reference that has no rows; give the reason."""
        reason = self.read(job.account_id, ref)[ref]
        assert isinstance(reason, str)
        return reason


@pytest.fixture
def study(database: Database, builders: Builders, tmp_path: Path) -> Study:
    """A study without Jobs."""
    store = open_store((tmp_path / "objects").as_uri())
    return Study(database, builders, store, tmp_path / "spool")


def ref_to(
    job: Job, request: int | str, layer: int, positions: Sequence[int], site: Site = Site.resid_post
) -> RowsOf:
    """Refer to rows of a request by its index or its custom_id."""
    index, name = (request, None) if isinstance(request, int) else (None, request)
    return RowsOf(job.id, index, name, layer, site, tuple(positions))


def bits(vector: Vector | str) -> Any:
    """The float32 bits of a vector that was read."""
    assert isinstance(vector, Vector), vector
    assert vector.dtype == "float32"
    return vector.to_float32().view("<u4")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_come_back_bit_for_bit_in_the_order_asked_for(study: Study, dtype: str) -> None:
    reads = [a_read(index, [STREAM], dtype=dtype) for index in range(5)]
    job = study.run(reads)
    refs = [
        ref_to(job, index if by_index else f"c-{index}", layer, positions)
        for index in range(5)
        for by_index in (True, False)
        for layer in (1, 3)
        for positions in ((0,), (RAN - 1, 0, 4), tuple(range(RAN)))
    ]
    found = study.read(job.account_id, *refs)
    assert len(found) == len(refs)
    for ref in refs:
        index = int(ref.custom_id[2:]) if ref.custom_id else ref.request_index
        assert index is not None
        wanted = reads[index].wanted["residual_stream", ref.layer][list(ref.positions)]
        assert np.array_equal(bits(found[ref]), wanted)


def test_named_captures_serve_their_site_and_those_after_all_ops_come_first(study: Study) -> None:
    captures = [
        a_capture("early", site=Site.mlp_out, layers=(2,), before=True),
        a_capture("late", site=Site.mlp_out, layers=(2,), spans=((0, 5),)),
        a_capture("norms", Reduce.norm, site=Site.mlp_out, layers=(2,)),
        STREAM,
    ]
    reads = [a_read(0, captures)]
    job = study.run(reads)
    after = ref_to(job, 0, 2, (1, 4), Site.mlp_out)
    only_before = ref_to(job, 0, 2, (1, 6), Site.mlp_out)
    found = study.read(job.account_id, after, only_before)
    assert np.array_equal(bits(found[after]), reads[0].wanted["late", 2][[1, 4]])
    assert np.array_equal(bits(found[only_before]), reads[0].wanted["early", 2][[1, 6]])


def test_a_capture_of_some_positions_has_those_rows(study: Study) -> None:
    spans = ((1, 3), (5, 7))
    reads = [a_read(index, [a_capture("some", spans=spans)]) for index in range(3)]
    job = study.run(reads)
    ref = ref_to(job, 1, 1, (6, 2, 5))
    # The file's rows of a request are positions 1, 2, 5, 6.
    wanted = reads[1].wanted["some", 1][[3, 1, 2]]
    assert np.array_equal(bits(study.read(job.account_id, ref)[ref]), wanted)


def test_only_row_groups_with_wanted_rows_are_read(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = row_group_rows(HIDDEN)
    reads = [a_read(0, [STREAM], prompt=group, generated=group // 4), a_read(1, [STREAM])]
    job = study.run(reads, shard_size=1)
    opened = []
    copy_group = captured_module._copy_group

    def counted(table: Any, items: Any) -> None:
        opened.append(len(table))
        copy_group(table, items)

    monkeypatch.setattr(captured_module, "_copy_group", counted)
    edges = (group - 1, group)
    for positions, groups in (((5,), 1), ((group + 5,), 1), ((group + 5, 5), 2), (edges, 2)):
        ref = ref_to(job, 0, 1, positions)
        opened.clear()
        wanted = reads[0].wanted["residual_stream", 1][list(positions)]
        assert np.array_equal(bits(study.read(job.account_id, ref)[ref]), wanted)
        assert len(opened) == groups
    opened.clear()
    last = ref_to(job, 1, 1, (0,))
    study.read(job.account_id, last)
    assert len(opened) == 1


def test_many_references_to_one_file_open_it_once(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = [a_read(index, [STREAM]) for index in range(8)]
    job = study.run(reads, shard_size=8)
    refs = [
        ref_to(job, index, layer, (position,))
        for index in range(8)
        for layer in (1, 3)
        for position in range(RAN)
    ]
    keys = []
    get_range = study.store.get_range

    def counted(key: str, start: int, end: int) -> bytes:
        keys.append(key)
        return get_range(key, start, end)

    monkeypatch.setattr(study.store, "get_range", counted)
    found = study.read(job.account_id, *refs)
    assert all(isinstance(found[ref], Vector) for ref in refs)
    assert len(set(keys)) == 2
    assert len(keys) < 20


def test_rows_of_two_jobs_are_read_together_and_a_part_is_enough(study: Study) -> None:
    first = study.run([a_read(0, [STREAM], seed=1)])
    second = study.run([a_read(index, [STREAM], seed=2) for index in range(4)], shards=1)
    third = study.builders.a_job(account_id=second.account_id, specs=[a_read(0, []).work.spec])
    assert first.account_id != second.account_id
    refs = [ref_to(second, 1, 3, (2,)), ref_to(second, 3, 3, (2,)), ref_to(third, 0, 1, (0,))]
    found = study.read(second.account_id, *refs, ref_to(first, 0, 1, (0,)))
    assert isinstance(found[refs[0]], Vector)
    assert "has not finished" in str(found[refs[1]])
    assert "has not finished" in str(found[refs[2]])
    assert "this account has no Job" in str(found[ref_to(first, 0, 1, (0,))])


def test_a_reason_says_what_is_missing_and_what_there_is(study: Study) -> None:
    captures = [
        a_capture("norms", Reduce.norm, site=Site.attn_out),
        a_capture("some", site=Site.mlp_out, spans=((0, 3),)),
        STREAM,
    ]
    job = study.run([a_read(0, captures), a_read(1, [])])
    cases = {
        ref_to(job, 7, 1, (0,)): "request 7 of job_",
        ref_to(job, "c-7", 1, (0,)): "request custom_id 'c-7' of job_",
        ref_to(job, 0, 2, (0,)): "captured resid_post not at layer 2; it has layers 1, 3",
        ref_to(job, 0, 1, (0,), Site.attn_out): "no rows of attn_out; it captured mlp_out, resid_p",
        ref_to(job, 1, 1, (0,)): "it captured no rows at all",
        ref_to(
            job, 0, 1, (2, RAN)
        ): f"ran positions 0 to {RAN - 1} and so has no row at position 9",
        ref_to(job, 0, 1, (1, 2, 3, 4), Site.mlp_out): "without positions 3, 4",
    }
    for ref, says in cases.items():
        reason = study.refused(job, ref)
        assert says in reason
        assert len(reason) < 300
    unknown = RowsOf(new_uuid(), 0, None, 1, Site.resid_post, (0,))
    assert "this account has no Job" in study.refused(job, unknown)


def test_a_request_that_was_errored_has_no_rows(study: Study) -> None:
    job = study.builders.a_job(specs=[a_read(0, [STREAM]).work.spec])
    shard = study.builders.a_lease()
    assert study.database.run(
        lambda conn: finish_shard(conn, shard, errored([0]), named_part(shard))
    )
    assert "is errored and captured nothing" in study.refused(job, ref_to(job, 0, 1, (0,)))


def test_more_rows_than_allowed_are_refused_before_they_are_read(study: Study) -> None:
    job = study.run([a_read(index, [STREAM]) for index in range(4)])
    refs = [ref_to(job, index, 1, range(RAN)) for index in range(4)]
    size = 4 * RAN * HIDDEN * 4
    assert len(study.read(job.account_id, *refs, bytes_max=size)) == 4
    with pytest.raises(InvalidRequestError) as refused:
        study.read(job.account_id, *refs, bytes_max=size - 1)
    assert refused.value.code == "captured_rows_too_large"
    assert refused.value.param == "requests"
    with pytest.raises(InvalidRequestError, match="this Completion") as alone:
        study.read(job.account_id, *refs, bytes_max=size - 1, is_job=False)
    assert alone.value.param == "interventions"
    assert f"{size - 1} bytes" in alone.value.message


def test_jobs_that_are_not_the_accounts_cost_one_look_and_its_own_are_counted(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = study.run([a_read(0, [STREAM])])
    other = study.builders.a_job(account_id=job.account_id, specs=[a_read(0, []).work.spec])
    looks = []
    run = study.database.run

    def counted(work: Any, **options: Any) -> Any:
        looks.append(work)
        return run(work, **options)

    monkeypatch.setattr(study.database, "run", counted)
    strange = [RowsOf(new_uuid(), 0, None, 1, Site.resid_post, (0,)) for _ in range(500)]
    found = study.read(job.account_id, *strange, jobs_max=1)
    assert all("this account has no Job" in str(found[ref]) for ref in strange)
    assert len(looks) == 1
    own = [ref_to(job, 0, 1, (0,)), ref_to(other, 0, 1, (0,))]
    assert len(study.read(job.account_id, *own, *strange, jobs_max=2)) == 502
    looks.clear()
    with pytest.raises(InvalidRequestError, match="Rows of 2 Jobs") as refused:
        study.read(job.account_id, *own, jobs_max=1)
    assert refused.value.code == "too_many_captured_jobs"
    assert len(looks) == 1
