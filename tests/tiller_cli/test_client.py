"""The client library against the real API: what it sends, what it refuses by itself."""

import numpy as np
import pytest
import torch

from app.jobs.records import Job
from app.kit.ids import public_id
from tests.fixtures.api import Api
from tests.fixtures.tiny_model import HIDDEN_SIZE
from tests.results.conftest import bench
from tests.results.workbench import Workbench
from tiller.client import Client
from tiller.errors import JobFailedError, OtherFilesError
from tiller.tensors import decode, encode

__all__ = ["bench"]
ROW = np.linspace(-1, 1, HIDDEN_SIZE, dtype=np.float32)


@pytest.mark.parametrize(
    "vector", [ROW, ROW.astype(np.float64), torch.tensor(ROW), torch.tensor(ROW).requires_grad_()]
)
def test_arrays_and_tensors_go_where_lists_of_numbers_do(client: Client, vector: object) -> None:
    op = {"op": "add", "layers": [np.int64(1)], "vector": vector, "scale": np.float32(0.5)}
    request = {"prompt": "hi", "max_tokens": np.int32(2), "interventions": [op]}
    job = client.create_job(model="tiny", requests=[request])
    assert job["request_counts"]["total"] == 1
    (seen,) = client.requests(job["id"])
    assert (seen["request_index"], seen["status"]) == (0, "pending")
    assert [each["id"] for each in client.jobs(limit=1)] == [job["id"]]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), np.float32("-inf")])
def test_a_number_that_is_not_finite_is_refused_before_it_is_sent(
    client: Client, api: Api, number: float
) -> None:
    before = api.numbers()
    with pytest.raises(ValueError, match="NaN or infinite"):
        client.create_job(
            model="tiny",
            requests=[{"prompt": "hi", "interventions": [{"vector": np.full(4, number)}]}],
        )
    with pytest.raises(TypeError, match="object cannot be sent"):
        client.create_job(model="tiny", requests=[{"prompt": object()}])
    assert api.numbers() == before


def test_vectors_are_stored_listed_used_and_deleted(client: Client) -> None:
    wide = torch.tensor(ROW).to(torch.bfloat16)
    stored = client.create_vector(wide, name="a direction", metadata={"from": "a test"})
    again = client.create_vector(encode(wide, dtype="float32"))
    assert again["id"] == stored["id"]
    other = client.create_vector(np.stack([ROW, -ROW]))
    assert {each["id"] for each in client.vectors()} == {stored["id"], other["id"]}
    op = {"op": "add", "layers": [1], "vector": stored["id"]}
    client.create_job(model="tiny", requests=[{"prompt": "hi", "interventions": [op]}])
    client.delete_vector(other["id"])
    assert [each["id"] for each in client.vectors(limit=1)] == [stored["id"]]


def test_a_tensor_of_bfloat16_is_encoded_bit_for_bit() -> None:
    tensor = torch.randn(3, HIDDEN_SIZE).to(torch.bfloat16)
    for dtype in ("float32", "bfloat16"):
        assert np.array_equal(decode(encode(tensor, dtype=dtype)), tensor.float().numpy())


def test_a_prompt_is_shown_as_tokens_and_limits_are_told(client: Client) -> None:
    tokens = client.tokenize(model="tiny", prompt="hi", add_special_tokens=False)
    assert len(tokens["token_ids"]) == len(tokens["tokens"])
    assert client.limits()


def test_an_address_without_v1_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"must end in /v1"):
        Client("http://127.0.0.1:8400", "sk")


def test_two_jobs_are_never_mixed_in_one_folder(
    client: Client, api: Api, bench: Workbench, tmp_path
) -> None:
    first, second = (a_finished_job(api, bench) for _ in range(2))
    folder = client.download(public_id("job", first.id), tmp_path / "results")
    assert client.download(public_id("job", first.id), folder) == folder
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(OtherFilesError, match="a folder of its own"):
        client.download(public_id("job", second.id), folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def a_finished_job(api: Api, bench: Workbench) -> Job:
    made = bench.a_job(requests=2, account_id=api.account_id)
    bench.run_shard()
    assert bench.finalize(made)
    return made


def test_a_failed_job_says_which_errors_and_shows_one_of_each() -> None:
    summary = [
        {"code": code, "count": count, "example_index": 7, "example_message": f"why {code}"}
        for code, count in (("steering_failed", 3), ("engine_died", 1))
    ]
    error = JobFailedError({"id": "job_x", "status": "failed", "error_summary": summary})
    assert str(error).splitlines() == [
        "Job job_x ended as failed.",
        "3 x steering_failed, as request 7: why steering_failed",
        "1 x engine_died, as request 7: why engine_died",
    ]
