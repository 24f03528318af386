"""Jobs, shards and requests under any order of moves by workers, users, reconciler and ghosts.

The model knows which leases are alive and what each request came to; Postgres must agree, and
every invariant must hold, after every single step.
"""

from uuid import UUID

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from app.jobs.claims import (
    claim_shards,
    expire_leases,
    finish_shard,
    give_back_shard,
    load_work,
    renew_leases,
    report_engine_death,
    split_off,
)
from app.jobs.lifecycle import (
    begin_finalizing,
    cancel_job,
    complete_job,
    expire_job,
    finishable_jobs,
    get_job,
    insert_files,
)
from app.jobs.records import Job, LeasedShard, RequestResult, WorkerIdentity
from app.kit.db import Conn, Database
from app.results.missing_parts import uncovered_ranges
from tests.checker import check_everything
from tests.fixtures.builders import Builders, cancelled, errored, insert_job, succeeded
from tests.fixtures.cleaning import empty_database
from tests.fixtures.parts import named_part, part_file

JOBS_MAX = 3


class JobMachine(RuleBasedStateMachine):
    database: Database

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[UUID] = []
        self.finished: dict[UUID, Job] = {}
        self.leases: list[LeasedShard] = []
        self.ghosts: list[LeasedShard] = []
        self.ended: dict[tuple[UUID, int], str] = {}

    @initialize()
    def a_service_with_one_worker(self) -> None:
        empty_database(self.database)
        builders = Builders(self.database)
        self.accounts = [builders.an_account(), builders.an_account()]
        self.worker: WorkerIdentity = builders.a_worker()

    def job_of(self, conn: Conn, job_id: UUID) -> Job:
        job = get_job(conn, job_id)
        assert job is not None
        return job

    def drop(self, shard: LeasedShard) -> None:
        self.leases.remove(shard)
        self.ghosts.append(shard)

    @precondition(lambda self: len(self.jobs) < JOBS_MAX)
    @rule(
        account=st.integers(0, 1),
        requests=st.integers(1, 9),
        shard_size=st.integers(1, 5),
        n=st.integers(1, 2),
    )
    def submit(self, account: int, requests: int, shard_size: int, n: int) -> None:
        with self.database.transaction() as conn:
            job = insert_job(
                conn, self.accounts[account], requests=requests, shard_size=shard_size, n=n
            )
        self.jobs.append(job.id)

    @rule(shards_max=st.integers(1, 3))
    def claim(self, shards_max: int) -> None:
        with self.database.transaction() as conn:
            leased = claim_shards(conn, self.worker, lease_seconds=600, shards_max=shards_max)
            assert len(leased) <= shards_max
            for shard in leased:
                assert not self.job_of(conn, shard.job_id).is_stopping
                for row in load_work(conn, shard):
                    assert (shard.job_id, row.request_index) not in self.ended
        tokens = [shard.lease_token for shard in self.leases + self.ghosts]
        assert all(shard.lease_token > max(tokens, default=0) for shard in leased)
        self.leases += leased

    def results(self, conn: Conn, data: st.DataObject, shard: LeasedShard) -> list[RequestResult]:
        stopping = self.job_of(conn, shard.job_id).is_stopping
        results: list[RequestResult] = []
        for row in load_work(conn, shard):
            choices = [succeeded, errored, cancelled] if stopping else [succeeded, errored]
            results += data.draw(st.sampled_from(choices))([row.request_index])
        return results

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(self.leases))
        with self.database.transaction() as conn:
            results = self.results(conn, data, shard)
            assert finish_shard(conn, shard, results, named_part(shard))
            job = self.job_of(conn, shard.job_id)
        for result in results:
            state = job.stopped_as if result.state == "cancelled" else result.state
            self.ended[shard.job_id, result.request_index] = state
        self.leases.remove(shard)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), cut=st.integers(0, 5))
    def split(self, data: st.DataObject, cut: int) -> None:
        shard = data.draw(st.sampled_from(self.leases))
        with self.database.transaction() as conn:
            head = split_off(conn, shard, shard.first_index + cut)
        if cut == 0:
            assert head is None
            self.drop(shard)
        else:
            assert head is not None
            assert head.end_index == min(shard.end_index, shard.first_index + cut)
            self.leases[self.leases.index(shard)] = head

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(self.leases))
        with self.database.transaction() as conn:
            assert give_back_shard(conn, shard)
        self.drop(shard)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def lease_runs_out(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(self.leases))
        with self.database.transaction() as conn:
            conn.execute(
                "UPDATE shards SET lease_expires_at = now() - interval '1 s' "
                "WHERE lease_token = %s",
                [shard.lease_token],
            )
        with self.database.transaction() as conn:
            assert expire_leases(conn, 10) == 1
        self.drop(shard)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), alone=st.booleans())
    def engine_dies(self, data: st.DataObject, alone: bool) -> None:  # noqa: FBT001
        shard = data.draw(st.sampled_from(self.leases))
        with self.database.transaction() as conn:
            blamed = report_engine_death(conn, shard, alone=alone)
            work = load_work(conn, shard)
        if blamed:
            assert len(work) == 1
            assert alone
        else:
            self.drop(shard)

    @precondition(lambda self: self.ghosts)
    @rule(data=st.data(), cut=st.integers(0, 3))
    def ghost_tries_everything(self, data: st.DataObject, cut: int) -> None:
        ghost = data.draw(st.sampled_from(self.ghosts))
        with self.database.transaction() as conn:
            results = succeeded(range(ghost.first_index, ghost.end_index))
            assert not finish_shard(conn, ghost, results, named_part(ghost))
            assert not give_back_shard(conn, ghost)
            assert split_off(conn, ghost, ghost.first_index + cut) is None
            assert not report_engine_death(conn, ghost, alone=True)

    @rule()
    def heartbeat(self) -> None:
        tokens = [shard.lease_token for shard in self.leases + self.ghosts]
        with self.database.transaction() as conn:
            controls = renew_leases(conn, self.worker.worker_id, tokens, 600)
            assert set(controls) == {shard.lease_token for shard in self.leases}
            for shard in self.leases:
                stopping = self.job_of(conn, shard.job_id).is_stopping
                assert controls[shard.lease_token].cancel == stopping

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(self.jobs))
        with self.database.transaction() as conn:
            before = self.job_of(conn, job_id)
            after = cancel_job(conn, job_id)
        assert after is not None
        assert after.n_running == before.n_running, "leased requests are the worker's"

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def time_is_over(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(self.jobs))
        with self.database.transaction() as conn:
            conn.execute(
                "UPDATE jobs SET expires_at = now() - interval '1 s' "
                "WHERE id = %s AND finished_at IS NULL",
                [job_id],
            )
            assert not (expire_job(conn, job_id) and job_id in self.finished)

    @rule()
    def finish_jobs(self) -> None:
        with self.database.transaction() as conn:
            jobs = finishable_jobs(conn, 10)
        for job_id in jobs:
            with self.database.transaction() as conn:
                job = begin_finalizing(conn, job_id)
                assert job is not None
                name_missing_parts(conn, job)
                self.finished[job_id] = complete_job(conn, job_id, [])

    @invariant()
    def postgres_agrees_with_the_model(self) -> None:
        check_everything(self.database)
        with self.database.transaction() as conn:
            rows = conn.execute("SELECT job_id, request_index, state FROM requests").fetchall()
            for job_id, job in self.finished.items():
                assert self.job_of(conn, job_id) == job, "terminal is terminal"
        states = {(row["job_id"], row["request_index"]): row["state"] for row in rows}
        for request, state in self.ended.items():
            assert states[request] == state
        for request, state in states.items():
            if state in ("succeeded", "errored"):
                assert self.ended[request] == state


def name_missing_parts(conn: Conn, job: Job) -> None:
    """Record parts for requests that never ran, as finalizing does, without their files."""
    for item in uncovered_ranges(conn, job.id):
        row = conn.execute(
            "INSERT INTO parts (lease_token, job_id, first_index, end_index) "
            "VALUES (nextval('lease_tokens'), %s, %s, %s) RETURNING lease_token",
            [job.id, item.first_index, item.end_index],
        ).fetchone()
        assert row is not None
        token = row["lease_token"]
        file = part_file(item.first_index, item.end_index, token)
        insert_files(conn, job.id, [file], lease_token=token)


def test_jobs_keep_every_promise_under_any_order_of_moves(database) -> None:
    JobMachine.database = database
    run_state_machine_as_test(
        JobMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
