"""Two workers on two hosts, objects by S3 alone; one host is cut off in the middle of a Job."""

import hashlib
import io
import os
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest

from app.completions.spec import spec_from_json
from app.kit.ids import parse_id
from tests.faults.cluster import STUB
from tests.faults.published import post_job
from tests.faults.stub_engine import answer
from tests.faults.two_hosts import Far, Host, two_hosts, why_not

lack = why_not()
# Where everything is tested, a missing program is a fault of that machine's set-up.
pytestmark = pytest.mark.skipif(lack is not None and "CI" not in os.environ, reason=lack or "")
REQUESTS = 600
READS_EVERY = 10
REAL = os.environ.get("TILLER_TWO_HOSTS") == "real"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """A cluster with a stub worker on each of two hosts."""
    assert lack is None, lack
    with two_hosts(tmp_path_factory.mktemp("hosts")) as (far, first, second):
        for host in (first, second):
            far.start_on(host, STUB, STUB_SECONDS="0.1")
        far.wait(lambda: ready_hosts(far) == {"host-a", "host-b"}, "both workers", 60)
        yield far, first, second


def ready_hosts(far: Far) -> set[str]:
    """The hosts whose workers are ready and were heard of in the last two seconds."""
    rows = far.rows(
        """
        SELECT host FROM workers WHERE state = 'ready'
            AND heartbeat_at > clock_timestamp() - interval '2 seconds'
        """
    )
    return {row["host"] for row in rows}


def tokens_on(far: Far, host: Host) -> set[int]:
    """The lease tokens that are in the hands of a host."""
    rows = far.rows(
        """
        SELECT lease_token FROM shards JOIN workers ON workers.id = worker_id
        WHERE shards.state = 'leased' AND host = %(host)s
        """,
        host=host.name,
    )
    return {row["lease_token"] for row in rows}


def hosts_that_published(far: Far, job: str) -> set[str]:
    rows = far.rows(
        """
        SELECT DISTINCT host FROM shards JOIN workers ON workers.id = worker_id
        WHERE job_id = %(id)s AND shards.state = 'leased'
        """,
        id=parse_id("job", job),
    )
    return {row["host"] for row in rows}


def download(client: httpx.Client, job: str, path: str) -> bytes:
    """Fetch a file by the link to the S3 endpoint that the API gives."""
    answered = client.get(f"/v1/jobs/{job}/files/{path}")
    assert answered.status_code == 302, answered.text
    whole = httpx.get(answered.headers["location"])  # without a key
    assert whole.status_code == 200
    return whole.content


def read_results(far: Far, client: httpx.Client, job: str, count: int) -> dict[int, tuple]:
    """Fetch every file, compare it with the manifest and the invariants; give ids by request."""
    manifest = client.get(f"/v1/jobs/{job}/manifest").json()
    assert manifest["complete"] is True
    tokens: dict[int, tuple[int, ...]] = {}
    rows = 0
    for file in manifest["files"]:
        content = download(client, job, file["path"])
        found = (len(content), hashlib.sha256(content).hexdigest())
        assert found == (file["bytes"], file["sha256"])
        if file["kind"] == "results":
            table = pq.read_table(io.BytesIO(content), columns=["request_index", "token_ids"])
            rows += table.num_rows
            tokens |= {r["request_index"]: tuple(r["token_ids"]) for r in table.to_pylist()}
    assert rows == len(tokens) == count, "one row for each request"
    counts = client.get(f"/v1/jobs/{job}").json()["request_counts"]
    assert (counts["succeeded"], counts["total"]) == (count, count)
    far.check()
    return tokens


def check_results(far: Far, client: httpx.Client, job: str) -> None:
    """Every request succeeded once, as in a run without faults, and every file is as listed."""
    tokens = read_results(far, client, job, REQUESTS)
    stored = far.rows(
        "SELECT request_index, spec FROM requests WHERE job_id = %(id)s", id=parse_id("job", job)
    )
    specs = {row["request_index"]: spec_from_json(row["spec"]) for row in stored}
    assert tokens == {i: answer(spec).choices[0].token_ids for i, spec in specs.items()}


def wait_ended(far: Far, client: httpx.Client, job: str) -> None:
    """Wait until a Job is terminal."""

    def ended() -> bool:
        return client.get(f"/v1/jobs/{job}").json()["finished_at"] is not None

    far.wait(ended, "the Job to end", 90)


def test_one_job_runs_on_both_hosts_and_is_read_by_links_to_s3(hosts):
    far, first, second = hosts
    with far.client() as client:
        job = post_job(client, REQUESTS, reads_every=READS_EVERY)
        seen: set[str] = set()

        def both() -> bool:
            seen.update(hosts_that_published(far, job))
            return seen == {first.name, second.name}

        far.wait(both, "leases on both hosts")
        wait_ended(far, client, job)
        check_results(far, client, job)
        file = next(
            f
            for f in client.get(f"/v1/jobs/{job}/manifest").json()["files"]
            if f["kind"] == "results"
        )
        path = f"/v1/jobs/{job}/files/{file['path']}"
        whole = download(client, job, file["path"])
        link = client.get(path).headers["location"]
        assert httpx.get(link, headers={"range": "bytes=4-99"}).content == whole[4:100]
        through = client.get(path, params={"redirect": "false"}, headers={"range": "bytes=4-99"})
        assert (through.status_code, through.content) == (206, whole[4:100])
        assert client.head(path).headers["content-length"] == str(len(whole))


def test_hosts_have_addresses_of_their_own_and_see_no_folder_of_the_servers(hosts):
    far, first, second = hosts
    assert list((far.folder / "servers" / "s3").iterdir())
    for worker in far.workers:
        assert not list(Path(f"/proc/{worker.pid}/root{far.folder}/servers").iterdir())
    rows = far.rows(
        """
        SELECT DISTINCT host(client_addr) AS address FROM pg_stat_activity
        WHERE application_name = 'tiller'
        """
    )
    addresses = {row["address"] for row in rows}
    assert addresses == {far.network.address, first.address, second.address}


def test_a_host_that_is_cut_off_in_the_middle_loses_and_doubles_nothing(hosts):
    far, first, second = hosts
    with far.client() as client:
        job = post_job(client, REQUESTS, reads_every=READS_EVERY)
        taken = far.wait(lambda: tokens_on(far, first), "a lease on the first host")
        first.cut()
        far.wait(lambda: not tokens_on(far, first), "its leases to be ended", 60)
        far.wait(lambda: tokens_on(far, second), "the other host to go on")
        first.join()
        wait_ended(far, client, job)
        far.wait(lambda: first.name in ready_hosts(far), "the first host to be heard of", 90)
        check_results(far, client, job)
        parts = far.rows(
            "SELECT lease_token FROM parts WHERE job_id = %(id)s", id=parse_id("job", job)
        )
        assert not taken & {row["lease_token"] for row in parts}
        again = post_job(client, REQUESTS, reads_every=READS_EVERY)
        far.wait(lambda: tokens_on(far, first), "a new lease on the first host", 60)
        wait_ended(far, client, again)
        check_results(far, client, again)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="starts two engines; TILLER_TWO_HOSTS=real does")
@pytest.mark.timeout(600)
def test_real_engines_on_two_hosts_survive_a_pulled_cable(tmp_path):
    from tests.engine.tiny_model import make_tiny_llama  # torch, which the others do without

    model = make_tiny_llama(tmp_path / "llama")
    models_file = tmp_path / "served.toml"
    models_file.write_text(
        f'[models.tiny]\npath = "{model}"\ndtype = "float32"\nmax_num_seqs = 8\n'
        "max_num_batched_tokens = 256\nkv_cache_bytes = 67108864\nthreads = 1\n"
    )
    steer = [{"activations": [[0.1] * 64], "layer_indices": [1]}]
    with two_hosts(tmp_path, models_file) as (far, first, second), far.client() as client:
        for host in (first, second):
            far.start_on(host, "worker")
        far.wait(lambda: ready_hosts(far) == {"host-a", "host-b"}, "both engines", 300)
        job = post_job(
            client,
            400,
            reads_every=READS_EVERY,
            max_tokens=48,
            min_tokens=48,
            apply_steering_vectors=steer,
        )
        taken = far.wait(lambda: tokens_on(far, first), "a lease on the first host", 60)
        far.wait(lambda: tokens_on(far, second), "a lease on the second host", 60)
        first.cut()
        far.wait(lambda: not tokens_on(far, first), "its leases to be ended", 60)
        first.join()
        far.wait_finished(far.builders.job(parse_id("job", job)), seconds=200)
        tokens = read_results(far, client, job, 400)
        assert {len(ids) for ids in tokens.values()} == {48}
        parts = far.rows(
            "SELECT lease_token FROM parts WHERE job_id = %(id)s", id=parse_id("job", job)
        )
        assert taken - {row["lease_token"] for row in parts}, "what was cut off was run again"
        far.wait(lambda: ready_hosts(far) == {"host-a", "host-b"}, "both hosts again", 120)
