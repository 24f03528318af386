"""Backup and restore with the very commands of docs/operations.md, without Docker around them.

A service with finished Jobs and one that runs is dumped, goes on, and is copied and lost. What is
restored has every file that its database names, the Job that ran is finished, and nothing that
was handed out after the dump comes again.
"""

import hashlib
import io
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from app.__main__ import main
from app.kit.ids import parse_id
from app.kit.migrate import migrate
from app.main import create_app
from app.results.orphans import collect_orphan_parts
from app.stack.postgres import EmbeddedPostgres, _wheel_binaries
from tests.faults.cluster import Cluster, running_cluster
from tests.faults.published import post_job
from tests.fixtures.api import a_key
from tests.rules.source_tree import ROOT

PAGE = ROOT / "docs" / "operations.md"
FINISHED, RUNNING = 24, 160
READS_EVERY = 4


def command(program: str, *, holding: str = "") -> list[str]:
    """The words that the page gives to a program inside its container."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:4] == " " * 4]
    (line,) = (line for line in lines if re.search(rf"\b{program}\b", line) and holding in line)
    words = shlex.split(line.split("#")[0])
    words = words[: next(i for i, word in enumerate([*words, "<"]) if word in ("<", ">"))]
    if "--entrypoint" in words:  # --entrypoint PROGRAM SERVICE ARGUMENTS
        at = words.index("--entrypoint")
        return [words[at + 1], *words[at + 3 :]]
    return words[words.index(program) :]


def in_postgres(server: EmbeddedPostgres, words: list[str], **streams: Any) -> None:
    """Run one of Postgres' own programs as it runs beside the server."""
    host = psycopg.conninfo.conninfo_to_dict(server.url)["host"]
    subprocess.run(
        [str(_wheel_binaries() / words[0]), *words[1:]],
        env={**os.environ, "PGHOST": str(host)}, check=True, timeout=60, **streams,
    )  # fmt: skip


def tar(words: list[str], folder: Path, **streams: Any) -> None:
    """Run tar over the store's folder, which stands for the container's volume."""
    subprocess.run(
        [str(folder) if word == "/var/lib/objects" else word for word in words],
        check=True, timeout=60, **streams,
    )  # fmt: skip


@dataclass(frozen=True)
class Told:
    """What clients of the first service hold in their hands."""

    key: str
    finished: str
    running: str
    after: str
    files: dict[str, bytes]
    tokens: dict[int, list[int]]
    tokens_max: int


def client_of(cluster: Cluster, key: str) -> TestClient:
    """The API of a cluster, asked with a key."""
    return TestClient(create_app(cluster.settings), headers={"authorization": f"Bearer {key}"})


def read_files(client: TestClient, job: str) -> dict[str, bytes]:
    """Download what the manifest lists; each file must have its checksum."""
    found = {}
    for file in client.get(f"/v1/jobs/{job}/manifest").json()["files"]:
        content = client.get(f"/v1/jobs/{job}/files/{file['path']}").content
        assert hashlib.sha256(content).hexdigest() == file["sha256"]
        found[file["path"]] = content
    return found


def token_ids(files: dict[str, bytes]) -> dict[int, list[int]]:
    """The generated ids by request_index, out of the files of results."""
    tables = [pq.read_table(io.BytesIO(c)) for p, c in files.items() if p.startswith("results/")]
    rows = [row for table in tables for row in table.to_pylist()]
    assert len({row["request_index"] for row in rows}) == len(rows), "a request has two rows"
    return {row["request_index"]: row["token_ids"] for row in rows}


def ended(client: TestClient, job: str) -> bool:
    """Tell whether a Job is terminal."""
    return client.get(f"/v1/jobs/{job}").json()["finished_at"] is not None


def last_token(cluster: Cluster) -> int:
    """The lease token that was handed out last."""
    (row,) = cluster.rows("SELECT last_value FROM lease_tokens")
    token: int = row["last_value"]
    return token


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Told]:
    """A backup of a service that went on meanwhile, and what its clients knew at the end."""
    folder = tmp_path_factory.mktemp("backup")
    with running_cluster(
        tmp_path_factory.mktemp("live"), settings={"shard_requests_max": 8}
    ) as live:
        key = a_key(live.database, balance=1_000_000)[1]
        with client_of(live, key) as client:
            live.start_workers(1, STUB_SECONDS="0.05")
            finished = post_job(client, FINISHED, reads_every=READS_EVERY)
            live.wait(lambda: ended(client, finished), "the first Job")
            files = read_files(client, finished)
            running = post_job(client, RUNNING, reads_every=READS_EVERY)
            live.wait(lambda: live.leased_pids() and is_half_done(live, running), "half a Job")
            with (folder / "tiller.dump").open("wb") as dump:
                in_postgres(live.postgres, command("pg_dump"), stdout=dump)
            after = post_job(client, FINISHED, reads_every=READS_EVERY)
            live.wait(lambda: ended(client, running) and ended(client, after), "all Jobs")
            told = Told(
                key, finished, running, after, files,
                tokens=token_ids(read_files(client, running)), tokens_max=last_token(live),
            )  # fmt: skip
        with (folder / "objects.tar").open("wb") as copy:
            tar(command("tar", holding="--create"), live.folder / "objects", stdout=copy)
    return folder, told


def is_half_done(cluster: Cluster, job: str) -> bool:
    """Tell whether a Job has published parts and has requests that never ran."""
    (row,) = cluster.rows(
        "SELECT n_succeeded, n_total FROM jobs WHERE id = %(id)s", id=parse_id("job", job)
    )
    return bool(0 < row["n_succeeded"] < row["n_total"] / 2)


@pytest.fixture(scope="module")
def restored(
    backup: tuple[Path, Told], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A second service, restored from the backup; nothing of it runs but its servers."""
    folder, _ = backup
    cluster = Cluster(tmp_path_factory.mktemp("restored"))
    try:
        with (folder / "tiller.dump").open("rb") as dump:
            in_postgres(cluster.postgres, command("pg_restore"), stdin=dump)
        in_postgres(cluster.postgres, command("psql"), stdout=subprocess.DEVNULL)
        with (folder / "objects.tar").open("rb") as copy:
            tar(command("tar", holding="--extract"), cluster.folder / "objects", stdin=copy)
        migrate(cluster.postgres.url)
        yield cluster
    finally:
        cluster.close()


def verify(cluster: Cluster, *options: str) -> int:
    """Run the operator's command on a cluster; give its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILLER_DATABASE_URL", cluster.settings.database_url)
        patch.setenv("TILLER_OBJECT_STORE", cluster.settings.object_store)
        return main(["verify", *options])


def test_what_was_restored_is_whole_and_runs_on(
    restored: Cluster, backup: tuple[Path, Told], capsys: pytest.CaptureFixture[str]
) -> None:
    _, told = backup
    assert "verify --contents" in PAGE.read_text(encoding="utf-8")
    assert verify(restored, "--contents") == 0
    assert re.search(
        r"^[1-9][0-9]* files looked at, 0 faults found$", capsys.readouterr().out, re.MULTILINE
    )
    with client_of(restored, told.key) as client:
        assert not ended(client, told.running), "it was running when the dump was made"
        assert client.get(f"/v1/jobs/{told.after}").status_code == 404
        assert read_files(client, told.finished) == told.files
        before = last_token(restored)
        assert before > told.tokens_max
        restored.start_reconciler()
        restored.start_workers(1)
        restored.wait(lambda: ended(client, told.running), "the Job that was running")
        counts = client.get(f"/v1/jobs/{told.running}").json()["request_counts"]
        assert counts["succeeded"] == counts["total"] == RUNNING
        files = read_files(client, told.running)
        assert token_ids(files) == told.tokens
        published = {int(path.split(".")[-2]) for path in files if path.startswith("results/")}
        assert min(published) <= told.tokens_max, "parts of before the dump still count"
        assert max(published) > before, "and the rest was published under tokens that were new"
        later = post_job(client, FINISHED, reads_every=READS_EVERY)
        restored.wait(lambda: ended(client, later), "a new Job")
    restored.check()
    assert collect_orphan_parts(restored.database, restored.store, older_than_hours=0) > 0
    restored.check()
    assert verify(restored, "--contents") == 0


def test_verify_names_what_is_missing_short_changed_or_untrue(
    restored: Cluster, backup: tuple[Path, Told], capsys: pytest.CaptureFixture[str]
) -> None:
    _, told = backup
    number = parse_id("job", told.finished)
    assert number is not None
    folder = restored.folder / "objects" / "jobs" / number.hex
    gone, short, changed = sorted(folder.rglob("part-*.parquet"))[:3]
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-1])
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    with restored.database.transaction() as conn:
        conn.execute("UPDATE jobs SET prompt_tokens = prompt_tokens + 1 WHERE id = %s", [number])
    capsys.readouterr()
    assert verify(restored) == 1
    quick = capsys.readouterr().out
    assert f"{gone.name} is missing" in quick
    assert re.search(rf"{short.name} has \d+ bytes, its row says \d+", quick)
    assert f"is broken: {number}" in quick
    assert changed.name not in quick
    assert verify(restored, "--contents") == 1
    assert f"{changed.name} has another sha256 than its row" in capsys.readouterr().out


def test_verify_says_in_a_line_that_the_store_cannot_be_read(
    restored: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(name, "us-east-1")
        monkeypatch.setenv("TILLER_DATABASE_URL", restored.settings.database_url)
        monkeypatch.setenv("TILLER_OBJECT_STORE", "s3://bucket/prefix")
        assert main(["verify"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("the object store cannot be read: ") for line in said)
    assert "Traceback" not in "".join(said)
