"""One object store behind one class: a local folder, S3, GCS or Azure, by its URL.

Keys are made by this service from ids and numbers, never from what a user sent; `checked_key`
refuses anything else. What a put has returned from survives a power cut, and no reader ever sees
half an object: obstore renames into place, and on a local folder (where obstore does not fsync)
the file and every folder above it are fsynced here.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit
from uuid import UUID

import obstore
from obstore.store import GCSStore, LocalStore, S3Store, from_url

if TYPE_CHECKING:  # these exist for type checkers only
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Backend

CHUNK_BYTES = 1024**2  # what a streamed read holds in memory at once
PUT_CHUNK_BYTES = 8 * 1024**2
PUT_CONCURRENCY = 4  # x PUT_CHUNK_BYTES is what an upload holds in memory
KEY_BYTES_MAX = 900  # S3 allows 1,024 with the prefix

_SEGMENT = re.compile(r"[A-Za-z0-9_=][A-Za-z0-9_=.\-]*\Z")
# Bounds on every remote call: a store that hangs must not hang a worker past its lease.
_CLIENT: "ClientConfig" = {
    "connect_timeout": timedelta(seconds=5),
    "timeout": timedelta(seconds=60),
    # An endpoint of the operator's own may be http://; addresses of cloud stores are https://.
    "allow_http": True,
}
_RETRY: "RetryConfig" = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """What a store says of one object; `modified_at` is by the store's own clock."""

    key: str
    size: int
    modified_at: datetime


def job_folder(job_id: UUID) -> str:
    """Name the folder of a Job's files, without a slash at the end."""
    return f"jobs/{job_id.hex}"


def job_key(job_id: UUID, path: str) -> str:
    """Name the key of a Job's file; `path` is relative to the Job's folder, as in its manifest."""
    return checked_key(f"{job_folder(job_id)}/{path}")


def checked_key(key: str) -> str:
    """Give the key back when it is one that this service makes; raises ValueError otherwise."""
    if len(key) > KEY_BYTES_MAX or not all(_SEGMENT.match(part) for part in key.split("/")):
        msg = f"not a key of this service: {key[:200]!r}"
        raise ValueError(msg)
    return key


def open_store(url: str, *, links: bool = True, link_endpoint: str | None = None) -> "ObjectStore":
    """Open the store at `url` (file:///folder, s3://bucket/prefix, gs://…, az://…).

    A local folder is made when missing. Credentials and endpoint of a remote store come from
    where its own tools look for them (AWS_… variables). Presigned links are made unless `links`
    is false; they name `link_endpoint` where clients reach an S3 store by another address than
    this process does. Raises ValueError for a URL that names no store.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            msg = f"TILLER_OBJECT_STORE must be file:///absolute/folder, not {url!r}"
            raise ValueError(msg)
        folder = Path(unquote(parts.path))
        folder.mkdir(parents=True, exist_ok=True)
        return ObjectStore(LocalStore(folder), folder)
    if parts.scheme not in ("s3", "gs", "az") or not parts.netloc:
        msg = f"TILLER_OBJECT_STORE must be file:///…, s3://…, gs://… or az://…, not {url!r}"
        raise ValueError(msg)
    if parts.scheme != "s3":
        backend = from_url(url, client_options=_CLIENT, retry_config=_RETRY)
        signer = backend if links and isinstance(backend, GCSStore) else None
        return ObjectStore(backend, None, signer=signer)
    # One object is deleted at a time; what S3 stores answer to a list of one differs.
    bucket = S3Store.from_url(
        url, client_options=_CLIENT, retry_config=_RETRY, disable_bulk_delete=True
    )
    if not links:
        return ObjectStore(bucket, None)
    if link_endpoint is None:
        return ObjectStore(bucket, None, signer=bucket)
    outside = S3Store.from_url(url, client_options=_CLIENT, endpoint=link_endpoint)
    return ObjectStore(bucket, None, signer=outside)


class ObjectStore:
    """Whole objects by key: put, read, list, delete. Safe to share between threads."""

    def __init__(
        self,
        backend: "Backend",
        folder: Path | None,
        *,
        signer: "S3Store | GCSStore | None" = None,
    ) -> None:
        """Wrap a backend; `folder` is its root when it is a local one, `signer` makes links."""
        self._backend = backend
        self._folder = folder
        self._signer = signer

    def put_file(self, path: Path, key: str) -> None:
        """Store a local file's content under `key`, whole or not at all; a big one in parts."""
        self._put(checked_key(key), path)

    def take_file(self, path: Path, key: str) -> None:
        """Store a local file under `key` and delete it here.

        Into a folder on the same disk it is moved, not copied: a part of 128 MiB costs nothing.
        """
        checked_key(key)
        if self._folder is not None:
            target = self._folder / key
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.replace(target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
            else:
                _make_durable(self._folder, key)
                return
        self.put_file(path, key)
        path.unlink()

    def put_bytes(self, data: bytes, key: str) -> None:
        """Store `data` under `key`, whole or not at all."""
        self._put(checked_key(key), data)

    def get_bytes(self, key: str) -> bytes:
        """Read a whole (small) object. Raises FileNotFoundError."""
        return obstore.get(self._backend, checked_key(key)).bytes().to_bytes()

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Read the bytes [start, end) of an object. Raises FileNotFoundError."""
        data = obstore.get_range(self._backend, checked_key(key), start=start, end=end)
        return data.to_bytes()

    def stream_range(self, key: str, start: int, end: int) -> Iterator[bytes]:
        """Read the bytes [start, end) in pieces of about 1 MiB.

        Raises FileNotFoundError at once, before the first piece is asked for. An empty range
        reads nothing.
        """
        checked_key(key)
        if start >= end:
            return iter(())
        answer = obstore.get(self._backend, key, options={"range": (start, end)})
        return (bytes(piece) for piece in answer.stream(min_chunk_size=CHUNK_BYTES))

    def head(self, key: str) -> ObjectMeta | None:
        """Look at an object without reading it; None when there is none."""
        try:
            meta = obstore.head(self._backend, checked_key(key))
        except FileNotFoundError:
            return None
        return ObjectMeta(meta["path"], meta["size"], meta["last_modified"])

    def list(self, folder: str) -> Iterator[ObjectMeta]:
        """List every object below a folder, in no promised order."""
        for batch in obstore.list(self._backend, checked_key(folder), chunk_size=1000):
            for meta in batch:
                yield ObjectMeta(meta["path"], meta["size"], meta["last_modified"])

    def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error."""
        try:
            obstore.delete(self._backend, checked_key(key))
        except FileNotFoundError:
            return

    def presign(self, key: str, seconds: int) -> str | None:
        """Make a link that reads the object without a key for `seconds`; None where none exists."""
        checked_key(key)
        if self._signer is None:
            return None
        return obstore.sign(self._signer, "GET", key, timedelta(seconds=seconds))

    def check(self) -> None:
        """Prove that the store can be reached; raises what the store raises, or OSError."""
        if self._folder is not None and not self._folder.is_dir():
            raise NotADirectoryError(self._folder)
        self.head("health")

    def delete_stale_uploads(self, before: datetime) -> int:
        """Delete what broken puts left in a local folder (`name#1`); return how many there were.

        Remote stores drop unfinished uploads by their own life-cycle rules.
        """
        if self._folder is None:
            return 0
        count = 0
        for path in self._folder.rglob("*#[0-9]*"):
            try:
                if path.is_file() and path.stat().st_mtime < before.timestamp():
                    path.unlink()
                    count += 1
            except FileNotFoundError:
                continue  # another process was faster
        return count

    def _put(self, key: str, content: Path | bytes) -> None:
        obstore.put(
            self._backend,
            key,
            content,
            chunk_size=PUT_CHUNK_BYTES,
            max_concurrency=PUT_CONCURRENCY,
        )
        if self._folder is not None:
            _make_durable(self._folder, key)


def _make_durable(folder: Path, key: str) -> None:
    """Fsync the file, then each folder from it up to the store's root: names are data too."""
    path = folder / key
    with _opened(path) as descriptor:
        os.fsync(descriptor)
    while path != folder:
        path = path.parent
        with _opened(path) as descriptor:
            os.fsync(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
