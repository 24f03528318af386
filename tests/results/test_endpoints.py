"""Manifest and files over HTTP, on the real API."""

import base64
import hashlib

import pytest
from fastapi import FastAPI

from app.jobs.records import Job
from app.kit.ids import new_uuid, public_id
from app.storage import ObjectStore, open_store
from tests.fixtures.api import Api
from tests.results.workbench import Workbench


@pytest.fixture
def job(api: Api, bench: Workbench) -> Job:
    """A finished Job of the API's account, four requests in two parts."""
    made = bench.a_job(requests=4, account_id=api.account_id)
    bench.run_shard()
    bench.run_shard()
    assert bench.finalize(made)
    return made


def url(job: Job, path: str = "") -> str:
    """Address a Job's files."""
    return f"/v1/jobs/{public_id('job', job.id)}/{path or 'manifest'}"


def test_after_the_end_the_manifest_is_the_file_byte_for_byte(
    api: Api, bench: Workbench, job: Job
) -> None:
    answer = api.client.get(url(job))
    assert answer.status_code == 200
    assert answer.content == bench.files(job)["manifest.json"]
    assert answer.content == api.client.get(url(job, "files/manifest.json")).content
    again = api.client.get(url(job), headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_every_listed_file_downloads_with_its_checksum(
    api: Api, bench: Workbench, job: Job
) -> None:
    manifest = api.client.get(url(job)).json()
    for file in manifest["files"]:
        answer = api.client.get(url(job, f"files/{file['path']}"))
        assert answer.status_code == 200
        assert hashlib.sha256(answer.content).hexdigest() == file["sha256"]
        assert answer.headers["etag"] == f'"{file["sha256"]}"'
        digest = base64.b64encode(hashlib.sha256(answer.content).digest()).decode()
        assert answer.headers["repr-digest"] == f"sha-256=:{digest}:"
        assert answer.headers["content-type"] == "application/vnd.apache.parquet"
        assert answer.headers["content-length"] == str(file["bytes"])
        assert answer.headers["content-disposition"].startswith("attachment; filename=")
    sums = api.client.get(url(job, "files/SHA256SUMS"))
    assert sums.content == bench.files(job)["SHA256SUMS"]
    assert sums.headers["content-type"] == "text/plain; charset=utf-8"


def test_a_live_job_shows_its_closed_parts(api: Api, bench: Workbench) -> None:
    job = bench.a_job(requests=4, account_id=api.account_id)
    empty = api.client.get(url(job)).json()
    assert (empty["complete"], empty["files"]) == (False, [])
    bench.run_shard()
    one = api.client.get(url(job))
    assert one.json()["sequence"] > empty["sequence"]
    (results,) = [f for f in one.json()["files"] if f["kind"] == "results"]
    assert results["rows"] == 2
    answer = api.client.get(url(job, f"files/{results['path']}"))
    assert hashlib.sha256(answer.content).hexdigest() == results["sha256"]
    assert api.client.get(url(job, "files/manifest.json")).status_code == 404


def test_a_broken_download_is_resumed_by_range(api: Api, job: Job) -> None:
    file = api.client.get(url(job)).json()["files"][0]
    where = url(job, f"files/{file['path']}")
    first = api.client.get(where, headers={"range": "bytes=0-99"})
    assert first.status_code == 206
    assert first.headers["content-range"] == f"bytes 0-99/{file['bytes']}"
    assert first.headers["content-length"] == "100"
    rest = api.client.get(where, headers={"range": "bytes=100-", "if-range": first.headers["etag"]})
    assert rest.status_code == 206
    assert hashlib.sha256(first.content + rest.content).hexdigest() == file["sha256"]
    changed = api.client.get(where, headers={"range": "bytes=100-", "if-range": '"other"'})
    assert (changed.status_code, len(changed.content)) == (200, file["bytes"])


def test_a_range_outside_the_file_is_416_with_its_size(api: Api, job: Job) -> None:
    file = api.client.get(url(job)).json()["files"][0]
    answer = api.client.get(
        url(job, f"files/{file['path']}"), headers={"range": f"bytes={file['bytes']}-"}
    )
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{file['bytes']}"
    body = answer.json()
    assert body["error"]["code"] == "range_not_satisfiable"
    assert body["request_id"] == answer.headers["x-request-id"]


def test_head_says_what_get_would(api: Api, job: Job) -> None:
    file = api.client.get(url(job)).json()["files"][0]
    where = url(job, f"files/{file['path']}")
    head, get = api.client.head(where), api.client.get(where)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "content-type", "accept-ranges", "repr-digest"):
        assert head.headers[name] == get.headers[name]
    known = api.client.get(where, headers={"if-none-match": head.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")
    assert api.client.head(url(job)).headers["etag"] == api.client.get(url(job)).headers["etag"]


HOSTILE_PATHS = (
    "%2e%2e/manifest.json", "..%2fmanifest.json", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd",
    "//etc/passwd", "results/%2e%2e/manifest.json", "results/%00", "results", "results/", "",
    "nothing.parquet", "MANIFEST.JSON", "manifest.json/", "results%5C..%5Cmanifest.json",
    "a" * 3000, "%ff%fe", "results/*", "'; DROP TABLE jobs; --",
)  # fmt: skip


def test_a_path_that_the_manifest_does_not_list_is_404(api: Api, job: Job) -> None:
    for path in HOSTILE_PATHS:
        answer = api.client.get(url(job, "files/") + path)
        assert answer.status_code == 404, (path, answer.text)
        assert answer.json()["error"]["code"] == "not_found"


def test_moments_are_not_for_download(api: Api, bench: Workbench, job: Job) -> None:
    moments = [path for path in bench.files(job) if path.startswith("moments/")]
    assert moments
    for path in moments:
        assert api.client.get(url(job, f"files/{path}")).status_code == 404


def test_another_account_a_wrong_id_and_a_key_without_scope_see_nothing(api: Api, job: Job) -> None:
    other = {"authorization": f"Bearer {api.as_other()}"}
    unscoped = {"authorization": f"Bearer {api.as_other(scopes=frozenset({'completions'}))}"}
    for path in ("manifest", "files/manifest.json"):
        assert api.client.get(url(job, path), headers=other).status_code == 404
        assert api.client.get(url(job, path), headers=unscoped).status_code == 403
        for wrong in (public_id("job", new_uuid()), "job_1", job.id.hex, "job_" + "g" * 32):
            assert api.client.get(f"/v1/jobs/{wrong}/{path}").status_code == 404


def test_on_s3_a_file_is_a_link_that_expires_and_head_needs_none(
    api: Api, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    application = api.client.app
    assert isinstance(application, FastAPI)
    application.state.store = open_store("s3://bucket/prefix")
    where = url(job, "files/SHA256SUMS")
    answer = api.client.get(where, follow_redirects=False)
    assert answer.status_code == 302
    assert f"/prefix/jobs/{job.id.hex}/SHA256SUMS?" in answer.headers["location"]
    assert "X-Amz-Expires=3600" in answer.headers["location"]
    assert answer.headers["cache-control"] == "no-store"
    head = api.client.head(where, follow_redirects=False)
    assert (head.status_code, head.headers["accept-ranges"]) == (200, "bytes")
    assert api.client.get(url(job, "files/x"), follow_redirects=False).status_code == 404


def test_while_the_store_is_away_files_are_503_and_the_job_is_still_told(
    api: Api, job: Job, store_away: ObjectStore
) -> None:
    path = api.client.get(url(job)).json()["files"][0]["path"]
    api.client.app.state.store = store_away  # type: ignore[attr-defined]
    for tail in (f"files/{path}", "files/manifest.json", "manifest"):
        answer = api.client.get(url(job, tail))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2"), tail
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("service_unavailable", "unavailable")
        assert "object store" in error["message"]
    assert api.client.get(f"/v1/jobs/{public_id('job', job.id)}").status_code == 200
