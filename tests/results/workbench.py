"""A Job with a real database and store, and a worker's part in it without an engine."""

from pathlib import Path

from app.jobs.claims import finish_shard
from app.jobs.records import Job, LeasedShard, RequestResult
from app.jobs.states import RequestState
from app.kit.db import Database
from app.results.finalize import finalize_job
from app.storage import ObjectStore, job_folder, open_store
from tests.fixtures.builders import Builders
from tests.results.samples import PROMPT, ROWS, Ran, a_run, open_part
from worker.part_writer import PartWriter


class Workbench:
    """A Job, its store, and a worker that publishes what `a_run` makes."""

    def __init__(self, database: Database, builders: Builders, tmp_path: Path) -> None:
        """Start with an empty store."""
        self.database = database
        self.builders = builders
        self.objects = tmp_path / "objects"
        self.store: ObjectStore = open_store(self.objects.as_uri())
        self.tmp_path = tmp_path

    def a_job(self, requests: int = 6, shard_size: int = 2, **fields: object) -> Job:
        """Make a Job whose requests are those of `a_run`."""
        specs = [self.run_of(index).work.spec for index in range(requests)]
        return self.builders.a_job(specs=specs, shard_size=shard_size, **fields)

    def run_of(self, index: int) -> Ran:
        """Make what the engine gives for a request."""
        return a_run(index, self.tmp_path / "mapped")

    def publish(self, shard: LeasedShard) -> PartWriter:
        """Write a shard's part, without telling the database."""
        writer = open_part(shard, self.store, self.tmp_path / "spool")
        for index in range(shard.first_index, shard.end_index):
            run = self.run_of(index)
            writer.add(run.work, run.outcome)
        return writer

    def run_shard(self) -> LeasedShard:
        """Lease a shard, run it, publish it, finish it."""
        shard = self.builders.a_lease()
        part = self.publish(shard).close()
        results = [
            RequestResult(
                request_index=index,
                state=RequestState.succeeded,
                completion_tokens=ROWS - PROMPT + 1,
            )
            for index in range(shard.first_index, shard.end_index)
        ]
        assert self.database.run(lambda conn: finish_shard(conn, shard, results, part))
        return shard

    def finalize(self, job: Job) -> bool:
        """Try to finish a Job."""
        return finalize_job(self.database, self.store, job.id)

    def folder(self, job: Job) -> Path:
        """The Job's folder."""
        return self.objects / job_folder(job.id)

    def files(self, job: Job) -> dict[str, bytes]:
        """Read everything in the Job's folder."""
        folder = self.folder(job)
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
