"""However a worker's proof of steering ends, at its start or later, its exit and its row say so."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.jobs.workers import FailedProof, failed_proofs
from tests.faults.cluster import Cluster, WorkerProcess, running_cluster
from worker.service import EXIT_CANARY_FAILED, EXIT_ENGINE_DEAD

CANNOT_START = 1


@dataclass
class Proving:
    """One supervised worker, and the file that it proves by."""

    cluster: Cluster
    file: Path
    worker: WorkerProcess

    def say(self, word: str) -> None:
        """Let the next proofs end like this."""
        draft = self.file.with_suffix(".new")
        draft.write_text(word, encoding="utf-8")
        draft.replace(self.file)

    def until_ended(self, status: int) -> int:
        """Wait until a process of the worker ends with this status; give its process id."""
        before, pid = len(self.worker.exits), self.worker.pid
        self.cluster.wait(lambda: len(self.worker.exits) > before, "the worker to end")
        assert self.worker.exits[before] == status, self.worker.log_text()[-2000:]
        return pid

    def row(self, pid: int) -> tuple[str, str | None]:
        """Read the state and the last proof of a process."""
        (row,) = self.cluster.rows(
            """
            SELECT state, canary FROM workers WHERE pid = %(pid)s
            ORDER BY started_at DESC LIMIT 1
            """,
            pid=pid,
        )
        return row["state"], row["canary"]

    def failed(self) -> list[FailedProof]:
        """Read what alarm and overview read."""
        return self.cluster.database.run(failed_proofs)

    def until_well(self) -> None:
        """Let proofs pass, and wait for a process that has passed."""
        self.say("passes")
        self.cluster.wait_ready()
        assert self.failed() == []


@pytest.fixture(scope="module")
def proving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proving]:
    """A worker that proves twice a second, and is started again whenever it ends."""
    folder = tmp_path_factory.mktemp("proving")
    file = folder / "proof"
    file.write_text("passes", encoding="utf-8")
    with running_cluster(folder) as cluster:
        worker = cluster.start_worker(
            "tests.worker.proving_worker", PROOF_FILE=str(file), TILLER_CANARY_SECONDS="0.5"
        )
        yield Proving(cluster, file, worker)


@pytest.mark.parametrize(
    ("word", "when", "status", "outcome"),
    [
        ("fails", "later", EXIT_CANARY_FAILED, "failed"),
        ("fails", "at its start", EXIT_CANARY_FAILED, "failed"),
        ("dies", "later", EXIT_ENGINE_DEAD, "passed"),
        ("dies", "at its start", EXIT_ENGINE_DEAD, None),
        ("broken", "at its start", CANNOT_START, None),
    ],
)
def test_a_worker_ends_with_the_status_that_is_documented_and_its_row_says_why(
    proving: Proving, word: str, when: str, status: int, outcome: str | None
) -> None:
    proving.until_well()
    proving.say(word)
    if when == "at its start":
        proving.worker.process.kill()
        proving.cluster.wait(lambda: proving.worker.exits[-1:] == [-9], "the next start")
    pid = proving.until_ended(status)
    assert proving.row(pid) == ("gone", outcome), "and stays so while its engine is stopped"
    failed = [proof.outcome for proof in proving.failed()]
    assert failed == ["failed"] * (outcome == "failed")
    proving.until_well()
