"""What a Job has published, read back and held against what the stub engine says of its specs."""

import io
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq

from app.completions.spec import RequestSpec, Sampling
from app.jobs.records import Job
from app.steering.spec import Capture, Site
from app.storage import job_key
from tests.faults.cluster import Cluster
from tests.faults.stub_engine import DIES, FAILS, HANGS, answer

ORDINARY = 10  # a first prompt token that asks for no misbehaviour
LAYERS = (0, 1)


def specs_of(count: int, *, special: dict[int, int] | None = None) -> list[RequestSpec]:
    """Describe requests that all differ; `special` gives some the first token of a misbehaviour.

    Every tenth captures the residual stream.
    """
    special = special or {}
    assert set(special.values()) <= {DIES, HANGS, FAILS}
    capture = Capture("residual_stream", Site.resid_post, LAYERS)
    return [
        RequestSpec(
            prompt_token_ids=(special.get(index, ORDINARY), index, 7),
            prompt=None,
            sampling=Sampling(max_tokens=3, seed=index),
            captures=(capture,) if index % 10 == 0 else (),
        )
        for index in range(count)
    ]


def post_job(client: httpx.Client, count: int, *, reads_every: int, **fields: object) -> str:
    """Post a Job of requests that all differ, some of which read the residual stream; give its id.

    Request 0 and each `reads_every`-th after it read; `fields` are those of every request.
    """
    requests = [
        {
            "prompt": [ORDINARY, 64 + index % 190, 7],
            "max_tokens": 3,
            "seed": index,
            **({"output_residual_stream": list(LAYERS)} if index % reads_every == 0 else {}),
            **fields,
        }
        for index in range(count)
    ]
    made = client.post("/v1/jobs", json={"model": "tiny", "requests": requests})
    assert made.status_code == 202, made.text
    job: str = made.json()["id"]
    return job


def texts_of(cluster: Cluster, job: Job) -> dict[int, Any]:
    """Read the token ids of every request with an output, by request_index."""
    found: dict[int, Any] = {}
    for row in _rows(cluster, job, "results", ["request_index", "status", "token_ids"]):
        if row["status"] == "succeeded":
            assert row["request_index"] not in found, "a request lies in two parts"
            found[row["request_index"]] = tuple(row["token_ids"])
    return found


def activations_of(cluster: Cluster, job: Job) -> dict[tuple[int, int], np.ndarray]:
    """Read the captured rows of every request that has some, by (request_index, layer)."""
    rows: dict[tuple[int, int], list[Any]] = {}
    columns = ["request_index", "residual"]
    for row in _rows(cluster, job, "activations", columns):
        rows.setdefault((row["request_index"], row["layer"]), []).append(row["residual"])
    return {key: np.array(value, dtype=np.float32) for key, value in rows.items()}


def assert_as_in_a_clean_run(
    cluster: Cluster, job: Job, specs: Sequence[RequestSpec], *, without: set[int] = frozenset()
) -> None:
    """Assert that every request has the very output that it has without any fault."""
    clean = {index: answer(spec) for index, spec in enumerate(specs) if index not in without}
    expected = {index: outcome.choices[0].token_ids for index, outcome in clean.items()}
    assert texts_of(cluster, job) == expected
    captured = activations_of(cluster, job)
    wanted = {
        (index, layer): values
        for index, outcome in clean.items()
        for capture in outcome.captures
        for layer, values in capture.layers.items()
    }
    assert captured.keys() == wanted.keys()
    for key, values in wanted.items():
        np.testing.assert_array_equal(captured[key], values, err_msg=str(key))


def _rows(cluster: Cluster, job: Job, kind: str, columns: list[str]) -> list[dict[str, Any]]:
    files = cluster.rows(
        """
        SELECT path, layer FROM result_files LEFT JOIN parts USING (lease_token)
        WHERE result_files.job_id = %(job_id)s AND kind = %(kind)s AND superseded_at IS NULL
        """,
        job_id=job.id,
        kind=kind,
    )
    rows = []
    for file in files:
        content = cluster.store.get_bytes(job_key(job.id, file["path"]))
        table = pq.read_table(io.BytesIO(content), columns=columns)
        rows += [{**row, "layer": file["layer"]} for row in table.to_pylist()]
    return rows


def settle_down(cluster: Cluster, job: Job, specs, *, without=frozenset()) -> None:
    """Wait for the end of a Job and check everything about it."""
    cluster.wait_finished(job)
    cluster.check()
    assert_as_in_a_clean_run(cluster, job, specs, without=without)
    ended = cluster.job(job)
    served = [specs[index] for index in range(len(specs)) if index not in without]
    assert ended.n_succeeded == len(served)
    assert ended.tokens_charged == sum(spec.tokens_held for spec in served)
