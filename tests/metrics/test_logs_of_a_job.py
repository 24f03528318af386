"""What all processes log while a Job runs: every line names its work, none tells what was in it."""

import base64
import json
from collections import Counter
from pathlib import Path
from uuid import UUID

import httpx
import numpy as np
import pytest

from tests.stack.conftest import make_data_dir
from tests.stack.running import RunningStack
from tests.stack.waiting import wait_for

PROMPT = "zebracrossing7731"
VECTOR = [0.7731997, -0.4418853, 0.1290774, 0.5, 0.25, 0.125, 0.0625, 0.9913377]


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    running = RunningStack(make_data_dir(tmp_path_factory.mktemp("logs") / "data"))
    running.wait_ready()
    yield running
    running.kill()
    wait_for(lambda: not running.processes(), "the guardian to end everything")


@pytest.fixture(scope="module")
def used(stack) -> tuple[dict[str, int], str, Path]:
    """Run a Job and some requests that are refused; give ids with their statuses, and the Job."""
    credentials = json.loads((stack.data_dir / "credentials.json").read_text())
    base, key = credentials["api_base"], credentials["api_key"]
    statuses: dict[str, int] = {}

    def note(answer: httpx.Response) -> None:
        statuses[answer.headers["x-request-id"]] = answer.status_code

    encoded = base64.b64encode(np.array([VECTOR], np.float32).tobytes()).decode()
    steered = {
        "prompt": f"{PROMPT} a b",
        "max_tokens": 2,
        "apply_steering_vectors": [{"activations": [VECTOR], "layer_indices": [0]}],
        "output_residual_stream": [1],
    }
    headers = {"authorization": f"Bearer {key}"}
    hooks = {"response": [note]}
    with httpx.Client(base_url=base, headers=headers, event_hooks=hooks, timeout=30) as client:
        job = client.post("/jobs", json={"model": "bare", "requests": [steered] * 20}).json()["id"]
        for body in (
            {"model": "bare", "requests": [{**steered, "unknown": encoded}]},
            {"model": "bare", "requests": [{**steered, "max_tokens": PROMPT}]},
            {"model": PROMPT, "requests": [steered]},
        ):
            assert client.post("/jobs", json=body).status_code in (400, 404)
        refused = client.get("/jobs", headers={"authorization": f"Bearer {key[:-1]}x"})
        assert refused.status_code == 401
        client.get("/jobs", params={"limit": PROMPT, "key": key})
        client.post("/completions", json={"model": "bare", **steered})

        def ended() -> bool:
            return client.get(f"/jobs/{job}").json()["finished_at"] is not None

        wait_for(ended, "the Job")
    return statuses, job, stack.data_dir


def lines_of(folder: Path, process: str) -> list[dict]:
    text = (folder / "logs" / f"{process}.log").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_every_line_is_json_and_names_process_level_and_time(used):
    _, _, folder = used
    for process in ("api", "reconciler", "worker"):
        lines = lines_of(folder, process)
        assert lines or process == "reconciler", process  # it may have had nothing to do
        for line in lines:
            assert {"time", "level", "process", "logger", "message"} <= line.keys()
            assert line["process"] == process


def test_every_request_has_one_line_that_says_how_it_ended(used):
    statuses, _, folder = used
    told = {
        line["request_id"]: line["status"]
        for line in lines_of(folder, "api")
        if line["message"] == "request"
    }
    counted = Counter(
        line["request_id"] for line in lines_of(folder, "api") if line["message"] == "request"
    )
    assert statuses.items() <= told.items()
    assert set(counted.values()) == {1}


def test_lines_of_the_worker_name_the_worker_and_the_job(used):
    _, job, folder = used
    lines = lines_of(folder, "worker")
    stamped = [line for line in lines if "worker_id" in line]
    assert {UUID(line["worker_id"]) for line in stamped}
    published = [line for line in lines if line["message"] == "shard published"]
    assert sum(line["requests"] for line in published) == 20
    for line in published:
        assert line["job_id"] == job
        assert line["worker_id"]
        assert line["lease_token"]


def test_no_line_holds_a_prompt_a_number_of_a_vector_or_a_key(used):
    _, _, folder = used
    credentials = json.loads((folder / "credentials.json").read_text())
    secrets = [credentials["api_key"], credentials["admin_key"], (folder / "pepper").read_text()]
    secrets += [secret[8:40] for secret in secrets]
    encoded = base64.b64encode(np.array(VECTOR, np.float32).tobytes()).decode()
    marks = [PROMPT, encoded[:16], *(str(number)[:7] for number in VECTOR)]
    marks = [mark for mark in marks if len(mark) >= 7]
    for log in sorted((folder / "logs").glob("*.log")):
        text = log.read_text(encoding="utf-8")
        for word in (*secrets, *marks):
            assert word.strip() not in text, f"{log.name} holds {word[:12]}…"
