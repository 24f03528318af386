"""The object store on a local folder, and what it makes of S3 addresses."""

import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.kit.ids import new_uuid
from app.storage import ObjectStore, job_folder, job_key, open_store


@pytest.fixture
def store(object_store_url: str) -> ObjectStore:
    """An empty store in a folder."""
    return open_store(object_store_url)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder behind `store`."""
    return tmp_path / "objects"


def test_bytes_come_back_whole_and_in_ranges(store: ObjectStore) -> None:
    key = job_key(new_uuid(), "activations/layer=3/part-0000000.7.parquet")
    content = bytes(range(256)) * 20_000
    store.put_bytes(content, key)
    assert store.get_bytes(key) == content
    assert store.get_range(key, 10, 20) == content[10:20]
    assert b"".join(store.stream_range(key, 5, len(content))) == content[5:]
    assert b"".join(store.stream_range(key, 7, 7)) == b""
    meta = store.head(key)
    assert meta is not None
    assert meta.size == len(content)


def test_a_stream_holds_about_a_mebibyte_at_a_time(store: ObjectStore) -> None:
    store.put_bytes(bytes(20 * 1024**2), "jobs/big")
    assert max(map(len, store.stream_range("jobs/big", 0, 20 * 1024**2))) <= 2 * 1024**2


def test_a_put_file_stays_and_a_taken_file_goes(store: ObjectStore, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(b"x" * 20_000_000)
    store.put_file(local, "jobs/copied")
    assert local.exists()
    store.take_file(local, "jobs/taken/deep/file")
    assert not local.exists()
    assert store.get_bytes("jobs/copied") == store.get_bytes("jobs/taken/deep/file")


def test_a_put_fsyncs_the_file_and_every_folder_above_it(
    store: ObjectStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def recording(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    store.put_bytes(b"1", "jobs/a/b")
    expected = [str(folder / "jobs/a/b"), str(folder / "jobs/a"), str(folder / "jobs")]
    assert synced == [*expected, str(folder)]
    synced.clear()
    (tmp_path / "local").write_bytes(b"1")
    store.take_file(tmp_path / "local", "jobs/a/c")
    assert synced[0] == str(folder / "jobs/a/c")
    assert synced[-1] == str(folder)


def test_readers_never_see_half_an_object(store: ObjectStore) -> None:
    key, size = "jobs/changing", 3_000_000
    store.put_bytes(b"a" * size, key)
    seen: set[bytes] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            content = store.get_bytes(key)
            seen.add(content[:1] if content == content[:1] * size else content)

    reader = threading.Thread(target=read)
    reader.start()
    for letter in b"bcdefgh":
        store.put_bytes(bytes([letter]) * size, key)
    done.set()
    reader.join()
    assert seen
    assert all(len(content) == 1 for content in seen)


@pytest.mark.parametrize(
    "key",
    [
        "../escape", "jobs/../../etc/passwd", "/absolute", "jobs//double", "jobs/./here", "",
        "jobs/a\0b", "jobs/ä", "jobs/a b", "jobs/%2e%2e/x", "jobs\\x", "jobs/.hidden", "jobs/",
        "jobs/a#1", "jobs/" + "a" * 2000,
    ],
)  # fmt: skip
def test_a_key_that_we_would_not_make_is_refused(store: ObjectStore, key: str) -> None:
    for act in (store.get_bytes, store.head, store.delete, lambda k: store.put_bytes(b"", k)):
        with pytest.raises(ValueError, match="not a key"):
            act(key)


def test_list_gives_what_lies_below_a_folder_and_nothing_else(store: ObjectStore) -> None:
    mine, other = new_uuid(), new_uuid()
    store.put_bytes(b"1", job_key(mine, "results/a"))
    store.put_bytes(b"22", job_key(mine, "manifest.json"))
    store.put_bytes(b"3", job_key(other, "manifest.json"))
    sizes = {meta.key: meta.size for meta in store.list(job_folder(mine))}
    assert sizes == {job_key(mine, "results/a"): 1, job_key(mine, "manifest.json"): 2}


def test_what_is_not_there_is_none_or_not_found_and_deletes_quietly(store: ObjectStore) -> None:
    assert store.head("jobs/nothing") is None
    store.delete("jobs/nothing")
    with pytest.raises(FileNotFoundError):
        store.get_bytes("jobs/nothing")
    with pytest.raises(FileNotFoundError):
        store.stream_range("jobs/nothing", 0, 10)


def test_only_old_unfinished_uploads_are_swept(store: ObjectStore, folder: Path) -> None:
    store.put_bytes(b"1", "jobs/whole")
    for name in ("jobs/old#1", "jobs/new#2"):
        (folder / name).write_bytes(b"half")
    os.utime(folder / "jobs/old#1", (0, 0))
    assert store.delete_stale_uploads(datetime.now(UTC) - timedelta(hours=1)) == 1
    assert not (folder / "jobs/old#1").exists()
    assert (folder / "jobs/new#2").exists()
    assert store.get_bytes("jobs/whole") == b"1"


def test_links_are_made_on_s3_only(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.presign("jobs/a", 60) is None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    link = open_store("s3://bucket/prefix").presign("jobs/a/layer=1/b.parquet", 60)
    assert link is not None
    assert "bucket" in link
    assert "/prefix/jobs/a/layer%3D1/b.parquet?" in link
    assert "X-Amz-Expires=60" in link
    assert "hidden" not in link


@pytest.mark.parametrize(
    "url", ["", "/tmp/x", "file://host/x", "ftp://x/y", "s3:///x", "memory:///"]
)
def test_an_address_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="TILLER_OBJECT_STORE"):
        open_store(url)


def test_a_folder_with_spaces_and_percent_signs_works(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20c"
    store = open_store(folder.as_uri())
    store.put_bytes(b"1", "jobs/x")
    assert (folder / "jobs/x").read_bytes() == b"1"
