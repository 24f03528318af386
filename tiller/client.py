"""The client library: submit a Job, follow it, download its files.

    client = Client.from_credentials("data/credentials.json")
    job = client.create_job(model="smollm2-135m", requests=[...])
    job = client.wait(job["id"], on_progress=print)
    folder = client.download(job["id"], f"results/{job['id']}")

Answers are the service's JSON as plain dictionaries. A call whose answer is lost is tried again, a
few times; creating a Job sends an Idempotency-Key, the same with every try, so no second Job comes
of it.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tiller.errors import ApiError, ChecksumError, JobFailedError, OtherFilesError
from tiller.requests_json import to_json
from tiller.tensors import encode

TERMINAL = frozenset({"completed", "failed", "cancelled", "expired"})
TRIES_MAX = 5
RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
REFUSED_STATUS = frozenset({409, 429})  # of those that are retried: nothing was done

Json = dict[str, Any]


class Client:
    """One account's view of a Tiller service."""

    def __init__(self, api_base: str, api_key: str, *, timeout: float = 120.0) -> None:
        """Talk to `api_base` (ends in /v1) with `api_key`; `timeout` is in seconds.

        Raises ValueError for another address.
        """
        if not api_base.rstrip("/").endswith("/v1"):
            msg = f"api_base must end in /v1, as in http://127.0.0.1:8400/v1; it is {api_base!r}."
            raise ValueError(msg)
        self._http = httpx.Client(
            base_url=api_base.rstrip("/") + "/",
            headers={"authorization": f"Bearer {api_key}"},
            timeout=timeout,
            follow_redirects=True,
        )

    @classmethod
    def from_credentials(cls, path: str | Path) -> "Client":
        """Read address and key from a credentials.json as `tiller up` writes it."""
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(data["api_base"], data["api_key"])

    def __enter__(self) -> Self:
        """Use as a context manager to close connections."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close connections."""
        self._http.close()

    def create_job(
        self,
        *,
        model: str,
        requests: Sequence[Mapping[str, Any]],
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> Json:
        """Submit a Job; `fields` are the Job's others (defaults, name, metadata, …).

        Arrays of numpy and torch may stand where lists of numbers do. Every call has a fresh
        `idempotency_key` unless told; with one of yours the same call may be made again, by
        another process too, and gives the same Job. Raises ApiError: 400 names every wrong
        request, 402 says how many tokens are missing, 422 that the key came with another body.
        """
        body = {"model": model, "requests": list(requests), **fields}
        return self._create("jobs", body, idempotency_key)

    def get_job(self, job_id: str, *, wait: int | None = None) -> Json:
        """Read a Job; with `wait`, answer at its next change or after so many seconds."""
        params = {} if wait is None else {"wait": wait}
        return self._json("GET", f"jobs/{job_id}", params=params)

    def cancel_job(self, job_id: str) -> Json:
        """Cancel a Job; what has finished stays."""
        return self._json("POST", f"jobs/{job_id}/cancel")

    def wait(
        self,
        job_id: str,
        *,
        on_progress: Callable[[Json], object] | None = None,
        timeout: float | None = None,
        poll_seconds: int = 2,
    ) -> Json:
        """Follow a Job to its end and return it.

        Raises JobFailedError unless it completed, TimeoutError after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            job = self.get_job(job_id, wait=poll_seconds)
            if on_progress is not None:
                on_progress(job)
            if job["status"] == "completed":
                return job
            if job["status"] in TERMINAL:
                raise JobFailedError(job)
            if deadline is not None and time.monotonic() > deadline:
                msg = f"Job {job_id} is still {job['status']} after {timeout} seconds."
                raise TimeoutError(msg)

    def requests(self, job_id: str, **filters: Any) -> Iterator[Json]:
        """Walk through the requests of a Job in index order."""
        return self._pages(f"jobs/{job_id}/requests", filters)

    def manifest(self, job_id: str) -> Json:
        """Read which files the Job has at this moment."""
        return self._json("GET", f"jobs/{job_id}/manifest")

    def create_vector(self, activations: Any, **fields: Any) -> Json:
        """Store a Steering vector; its id, sv_…, goes wherever a `vector` is wanted.

        `activations` is an array [hidden], [layers, hidden] or [layers, positions, hidden], or
        what `tiller.encode` made of one; `fields` are name and metadata. The same numbers always
        get the same id.
        """
        sent = activations if isinstance(activations, Mapping) else encode(activations)
        return self._create("steering_vectors", {"activations": sent, **fields})

    def vectors(self, **filters: Any) -> Iterator[Json]:
        """Walk through the account's stored vectors, the newest first."""
        return self._pages("steering_vectors", filters)

    def delete_vector(self, vector_id: str) -> None:
        """Delete a stored vector; results of Jobs that used it stay.

        Raises ApiError: 409 (code `vector_in_use`) while an unfinished Job uses the vector, 404
        when there is none. A 404 after a try whose answer was lost is no error: it is deleted.
        """
        self._json("DELETE", f"steering_vectors/{vector_id}", gone_is_done=True)

    def tokenize(self, *, model: str, prompt: Any, **fields: Any) -> Json:
        """Show a prompt as its tokens, at the positions that interventions and captures mean."""
        return self._json("POST", "tokenize", {"model": model, "prompt": prompt, **fields})

    def limits(self) -> Json:
        """Read what may be sent, and how much."""
        return self._json("GET", "limits")

    def jobs(self, **filters: Any) -> Iterator[Json]:
        """Walk through the account's Jobs, the newest first."""
        return self._pages("jobs", filters)

    def models(self) -> list[Json]:
        """List the served models and their capabilities."""
        data: list[Json] = self._json("GET", "models")["data"]
        return data

    def usage(self) -> Json:
        """Read the account's balance, held and charged tokens."""
        return self._json("GET", "usage")

    def download(self, job_id: str, folder: str | Path) -> Path:
        """Fetch every file of the manifest into `folder` and check each sha256.

        Files that are there already with the right bytes are kept, so a broken download goes on
        where it stopped. Raises ChecksumError when a file's bytes are wrong, OtherFilesError when
        the folder has Parquet files that are not of this Job: who reads a folder reads them all.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        manifest = self.manifest(job_id)
        named = {target / entry["path"] for entry in manifest["files"]}
        if others := sorted({*target.rglob("*.parquet")} - named):
            raise OtherFilesError(
                job_id, target, [str(path.relative_to(target)) for path in others]
            )
        for entry in manifest["files"]:
            self._fetch(job_id, entry, target / entry["path"])
        if manifest["complete"]:
            for name in ("manifest.json", "SHA256SUMS"):
                self._fetch(job_id, {"path": name, "sha256": None}, target / name)
        return target

    def _fetch(self, job_id: str, entry: Mapping[str, Any], path: Path) -> None:
        wanted = entry["sha256"]
        if wanted is not None and path.exists() and _sha256(path) == wanted:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        with self._http.stream("GET", f"jobs/{job_id}/files/{entry['path']}") as answer:
            if answer.is_error:
                answer.read()
                raise _api_error(answer)
            with partial.open("wb") as out:
                for block in answer.iter_bytes():
                    out.write(block)
        if wanted is not None and _sha256(partial) != wanted:
            partial.unlink()
            msg = f"{entry['path']} was damaged on its way; download it again."
            raise ChecksumError(msg)
        partial.replace(path)

    def _create(self, path: str, body: Json, key: str | None = None) -> Json:
        if key is None:
            key = str(uuid.uuid4())
        elif not (key and key.isascii() and key.isprintable()):
            msg = f"idempotency_key must be printable ASCII characters, not {key!r}."
            raise ValueError(msg)
        return self._json("POST", path, body, headers={"idempotency-key": key})

    def _pages(self, path: str, filters: Mapping[str, Any]) -> Iterator[Json]:
        after: str | None = None
        while True:
            params = {"limit": 100, **filters, **({"after": after} if after else {})}
            page = self._json("GET", path, params=params)
            yield from page["data"]
            if not page["has_more"]:
                return
            after = page["last_id"]

    def _json(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        gone_is_done: bool = False,
    ) -> Json:
        """Send until there is an answer to keep, TRIES_MAX times at most.

        With `gone_is_done`, 404 is good after a try that may have worked unseen.
        """
        content = None if body is None else to_json(body)
        sent = {"content-type": "application/json"} if content else {}
        is_unsure = False
        for attempt in range(1, TRIES_MAX + 1):
            try:
                answer = self._http.request(
                    method,
                    path,
                    content=content,
                    headers={**sent, **(headers or {})},
                    params=params,
                )
            except httpx.TransportError:
                if attempt == TRIES_MAX:
                    raise
                is_unsure = True
                time.sleep(0.5 * 2**attempt)
                continue
            if _may_change(answer) and attempt < TRIES_MAX:
                is_unsure = is_unsure or answer.status_code not in REFUSED_STATUS
                time.sleep(float(answer.headers.get("retry-after", 0.5 * 2**attempt)))
                continue
            if answer.status_code == 404 and gone_is_done and is_unsure:
                return {}
            if answer.is_error:
                raise _api_error(answer)
            data: Json = answer.json() if answer.content else {}
            return data
        raise AssertionError


def _may_change(answer: httpx.Response) -> bool:
    """Say whether the same request may have another answer soon.

    A 409 says so by retry-after: an earlier try with the same key is still being worked on, or a
    Job that uses the vector is being stored.
    """
    if answer.status_code == 409:
        return "retry-after" in answer.headers
    return answer.status_code in RETRIED_STATUS


def _api_error(answer: httpx.Response) -> ApiError:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    return ApiError(answer.status_code, body if isinstance(body, dict) else {})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
