"""The object store on a real S3 endpoint: the same promises as on a folder, and links."""

import hashlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from app.kit.ids import new_uuid
from app.storage import ObjectStore, job_folder, job_key, open_store
from tests.storage.gateway import Gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """An S3 endpoint for this module."""
    running = Gateway(tmp_path_factory.mktemp("s3"))
    yield running
    running.stop()


@pytest.fixture
def store(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A store in the gateway's bucket."""
    for name, value in gateway.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(gateway.url)


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
    assert abs(meta.modified_at - datetime.now(UTC)) < timedelta(hours=1)


def test_a_big_file_is_uploaded_in_parts_and_is_the_same_bytes(
    store: ObjectStore, gateway: Gateway, tmp_path: Path
) -> None:
    local = tmp_path / "part"
    local.write_bytes(os.urandom(30_000_000))
    digest = hashlib.sha256(local.read_bytes()).hexdigest()
    store.take_file(local, "jobs/big")
    assert not local.exists()
    whole = hashlib.sha256()
    for piece in store.stream_range("jobs/big", 0, 30_000_000):
        whole.update(piece)
    assert whole.hexdigest() == digest
    link = store.presign("jobs/big", 60)
    assert link is not None
    # S3 writes the number of parts behind the digest of an upload that had several.
    with httpx.stream("GET", link) as answer:
        assert answer.headers["etag"].strip('"').endswith("-4")


def test_what_is_not_there_is_none_or_not_found_and_deletes_quietly(store: ObjectStore) -> None:
    assert store.head("jobs/nothing") is None
    store.check()
    store.delete("jobs/nothing")
    with pytest.raises(FileNotFoundError):
        store.get_bytes("jobs/nothing")
    with pytest.raises(FileNotFoundError):
        store.stream_range("jobs/nothing", 0, 10)
    assert list(store.list("jobs/nobody")) == []


def test_a_deleted_object_is_gone(store: ObjectStore) -> None:
    store.put_bytes(b"1", "jobs/gone/layer=2/a")
    store.delete("jobs/gone/layer=2/a")
    assert store.head("jobs/gone/layer=2/a") is None
    store.delete("jobs/gone/layer=2/a")


def test_list_gives_what_lies_below_a_folder_and_nothing_else(store: ObjectStore) -> None:
    mine, other = new_uuid(), new_uuid()
    store.put_bytes(b"1", job_key(mine, "results/a"))
    store.put_bytes(b"22", job_key(mine, "manifest.json"))
    store.put_bytes(b"3", job_key(other, "manifest.json"))
    sizes = {meta.key: meta.size for meta in store.list(job_folder(mine))}
    assert sizes == {job_key(mine, "results/a"): 1, job_key(mine, "manifest.json"): 2}


def test_a_link_reads_one_object_in_ranges_without_a_key(store: ObjectStore) -> None:
    store.put_bytes(b"0123456789", "jobs/linked/layer=1/a.parquet")
    link = store.presign("jobs/linked/layer=1/a.parquet", 60)
    assert link is not None
    part = httpx.get(link, headers={"range": "bytes=2-4"})
    assert (part.status_code, part.content) == (206, b"234")
    other = link.replace("a.parquet", "b.parquet")
    assert httpx.get(other).status_code == 403


def test_links_name_the_endpoint_that_clients_reach_or_are_not_made(
    store: ObjectStore, gateway: Gateway
) -> None:
    outside = open_store(gateway.url, link_endpoint="https://objects.example.org")
    link = outside.presign("jobs/a", 60)
    assert link is not None
    assert link.startswith("https://objects.example.org/tiller/objects/jobs/a?")
    outside.put_bytes(b"1", "jobs/by-the-inside")
    assert open_store(gateway.url, links=False).presign("jobs/a", 60) is None


def test_a_store_that_is_away_raises_and_does_not_say_that_objects_are_missing(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in gateway.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another one")
    refused = open_store(gateway.url)
    for act in (refused.check, lambda: refused.head("jobs/a"), lambda: refused.get_bytes("jobs/a")):
        with pytest.raises(Exception, match=r"403|Access|Forbidden|permission") as raised:
            act()
        assert not isinstance(raised.value, FileNotFoundError)
