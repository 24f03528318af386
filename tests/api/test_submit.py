"""POST /v1/jobs: what is stored, what is held, and what a second request with one key gets."""

import threading
from typing import Any

import pytest

from app.jobs.claims import claim_shards
from app.jobs.schemas import PRIORITIES
from app.kit.ids import public_id
from tests.corpus.cases import encoded
from tests.fixtures.api import Api, a_key
from tests.fixtures.builders import Builders

ROW = [1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, -1.5]
STEER = {"activations": [ROW], "layer_indices": [1], "scale": 2}


def rows(api: Api, query: str) -> list[dict[str, Any]]:
    with api.database.transaction() as conn:
        return list(conn.execute(query))  # type: ignore[call-overload]


def specs(api: Api) -> list[dict[str, Any]]:
    return [row["spec"] for row in rows(api, "SELECT spec FROM requests ORDER BY request_index")]


def test_a_job_is_stored_whole_and_its_tokens_are_held(api: Api) -> None:
    answer = api.submit(
        {"prompt": "hi", "custom_id": "first"},
        {"prompt": [5, 6], "max_tokens": 4, "n": 3, "seed": 7},
        name="a study",
        metadata={"lab": "one"},
        priority="interactive",
        expires_in=3600,
    )
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert job["status"] == "queued"
    assert job["request_counts"]["total"] == job["request_counts"]["pending"] == 2
    assert (job["name"], job["metadata"], job["priority"]) == (
        "a study",
        {"lab": "one"},
        "interactive",
    )
    assert job["expires_at"] - job["created_at"] == 3600
    assert job["model_revision"] == "revision-1"
    # BOS, two letters and 16 tokens; two ids and three choices of four tokens.
    assert job["usage"]["held"] == (3 + 16) + (2 + 3 * 4)
    assert rows(api, "SELECT first_index, end_index FROM shards") == [
        {"first_index": 0, "end_index": 2}
    ]
    assert specs(api) == [
        {"prompt": "hi", "prompt_token_ids": [0, 73, 74], "sampling": {}},
        {"prompt_token_ids": [5, 6], "sampling": {"max_tokens": 4, "n": 3, "seed": 7}},
    ]
    usage = api.client.get("/v1/usage").json()
    assert usage["held"] == job["usage"]["held"]
    assert usage["available"] + usage["held"] == usage["balance"] == 1_000_000
    assert usage["holds"] == [{"job_id": job["id"], "requests": 2, "tokens_held": 33}]


def test_the_most_urgent_job_is_leased_first(api: Api, builders: Builders) -> None:
    ids = {name: api.submit(priority=name).json()["id"] for name in reversed(PRIORITIES)}
    worker = builders.a_worker(model_revision="revision-1")
    with api.database.transaction() as conn:
        leased = [
            public_id("job", shard.job_id)
            for _ in PRIORITIES
            for shard in claim_shards(conn, worker, lease_seconds=60, shards_max=1)
        ]
    assert leased == [ids[name] for name in PRIORITIES]


def test_defaults_lie_under_every_request_and_null_takes_one_back(api: Api) -> None:
    answer = api.submit(
        {"prompt": "a"},
        {"prompt": "b", "temperature": 0.5},
        {"prompt": "c", "stop": None},
        {"custom_id": "d", "body": {"prompt": "d", "max_tokens": 2}},
        defaults={"temperature": 0, "stop": "x", "max_tokens": 9},
    )
    assert answer.status_code == 202
    assert [spec["sampling"] for spec in specs(api)] == [
        {"max_tokens": 9, "temperature": 0.0, "stop": ["x"]},
        {"max_tokens": 9, "temperature": 0.5, "stop": ["x"]},
        {"max_tokens": 9, "temperature": 0.0},
        {"max_tokens": 2, "temperature": 0.0, "stop": ["x"]},
    ]


def test_numbers_that_many_requests_share_are_stored_once(api: Api) -> None:
    answer = api.submit(
        *({"prompt": f"p{number}", "seed": number} for number in range(50)),
        {"prompt": "own", "apply_steering_vectors": [{**STEER, "scale": -1}]},
        {"prompt": "other", "apply_steering_vectors": [{**STEER, "activations": [ROW[::-1]]}]},
        defaults={"apply_steering_vectors": [STEER]},
    )
    assert answer.status_code == 202
    assert len(rows(api, "SELECT FROM vectors")) == 2
    assert len(rows(api, "SELECT FROM job_vectors")) == 2
    stored = specs(api)
    names = [spec["interventions"][0]["vector"] for spec in stored]
    assert len(set(names[:51])) == 1
    assert names[51] != names[0]
    assert stored[50]["interventions"][0]["scale"] == -1.0
    api.submit({"prompt": "again", "apply_steering_vectors": [STEER]})
    assert len(rows(api, "SELECT FROM vectors")) == 2


def test_both_encodings_of_the_same_float32_numbers_are_one_vector(api: Api) -> None:
    plain = {"activations": [[1.0] * 8], "layer_indices": [1]}
    packed = {"activations": encoded(shape=[1, 8]), "layer_indices": [2]}
    half = {"activations": encoded(shape=[1, 8], kind="bfloat16"), "layer_indices": [3]}
    assert api.submit({"prompt": "a", "apply_steering_vectors": [plain, packed, half]}).is_success
    stored = rows(api, "SELECT dtype, shape, data FROM vectors ORDER BY dtype")
    assert [row["dtype"] for row in stored] == ["bfloat16", "float32"]
    assert bytes(stored[0]["data"]) == b"\x80\x3f" * 8
    assert bytes(stored[1]["data"]) == b"\x00\x00\x80\x3f" * 8


def test_a_stored_vector_can_be_used_by_its_name(api: Api) -> None:
    api.submit({"prompt": "a", "apply_steering_vectors": [STEER]})
    name = specs(api)[0]["interventions"][0]["vector"]
    again = api.submit(
        {"prompt": "b", "apply_steering_vectors": [{"vector": name, "layer_indices": [3]}]},
        defaults={"max_tokens": 1},
    )
    assert again.status_code == 202
    wrong = api.submit(
        {"prompt": "b", "apply_steering_vectors": [{"vector": name, "layer_indices": [1, 2]}]}
    )
    assert "1 rows" in wrong.json()["error"]["message"]
    big = {"vector": name, "layer_indices": [1], "scale": 3e38}
    overflow = api.submit({"prompt": "b", "apply_steering_vectors": [big]})
    assert "product" in overflow.json()["error"]["message"]


def test_a_job_that_costs_more_than_there_is_stores_nothing(api: Api) -> None:
    before = api.numbers()
    key = a_key(api.database, balance=18)[1]
    headers = {"authorization": f"Bearer {key}", "idempotency-key": "k"}
    steered = {"prompt": "hi", "apply_steering_vectors": [STEER]}
    answer = api.submit(steered, headers=headers)
    assert answer.status_code == 402
    assert answer.json()["error"]["code"] == "insufficient_tokens"
    assert api.numbers() == {**before, "balance": before["balance"] + 18, "entries": 2}
    # The key was not used up by the refusal, and one token less fits.
    fits = api.submit({**steered, "max_tokens": 15}, headers=headers)
    assert fits.status_code == 202


def test_every_problem_of_every_request_is_told_the_first_hundred_in_full(api: Api) -> None:
    bad = {"prompt": "a", "temperature": -1, "n": 0}
    answer = api.submit({"prompt": "good"}, *[bad] * 60)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["total"] == 120
    assert len(error["details"]) == 100
    assert error["param"] == "requests[1].temperature"
    assert error["details"][1] == {
        "index": 1,
        "param": "n",
        "code": "invalid_request",
        "message": "n must be a whole number from 1 to 128, not 0.",
    }


def test_the_same_key_and_body_give_the_same_answer_and_one_job(api: Api) -> None:
    first = api.submit(headers={"idempotency-key": "k"})
    again = api.submit(headers={"idempotency-key": "k"})
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert api.numbers()["jobs"] == 1
    other = api.as_other()
    foreign = api.submit(headers={"idempotency-key": "k", "authorization": f"Bearer {other}"})
    assert foreign.json()["id"] != first.json()["id"]


def test_without_a_key_two_submissions_are_two_jobs(api: Api) -> None:
    assert api.submit().json()["id"] != api.submit().json()["id"]


def test_one_key_sent_at_once_by_many_clients_makes_one_job(api: Api) -> None:
    barrier = threading.Barrier(8)
    answers: list[Any] = []

    def send() -> None:
        barrier.wait()
        answers.append(api.submit(headers={"idempotency-key": "race"}))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotent-replayed" not in answer.headers for answer in answers) == 1
    numbers = api.numbers()
    assert (numbers["jobs"], numbers["holds"], numbers["held"]) == (1, 1, 19)


def test_one_key_with_different_bodies_at_once_lets_one_body_win(api: Api) -> None:
    barrier = threading.Barrier(6)
    answers: list[Any] = []

    def send(number: int) -> None:
        barrier.wait()
        answers.append(api.submit({"prompt": f"p{number}"}, headers={"idempotency-key": "race"}))

    threads = [threading.Thread(target=send, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [202] + [422] * 5
    assert api.numbers()["jobs"] == 1


def test_many_clients_cannot_hold_more_than_there_is(api: Api) -> None:
    key = a_key(api.database, balance=19 * 5)[1]
    headers = {"authorization": f"Bearer {key}"}
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(api.submit(headers=headers).status_code))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [202] * 5 + [402] * 7


@pytest.mark.parametrize("count", [1, 513, 5000])
def test_shards_cover_every_request_once(api: Api, count: int) -> None:
    assert api.submit(*({"prompt": "a", "max_tokens": 1} for _ in range(count))).is_success
    ranges = rows(api, "SELECT first_index, end_index FROM shards ORDER BY first_index")
    assert ranges[0]["first_index"] == 0
    assert ranges[-1]["end_index"] == count
    firsts, ends = [r["first_index"] for r in ranges], [r["end_index"] for r in ranges]
    assert firsts[1:] == ends[:-1]


def test_text_survives_its_way_into_postgres(api: Api) -> None:
    prompts = ['back\\slash \\N "quote"', "line\nbreak\ttab\r", "ünï 😀", "\u007f\u0001"]
    names = ["a\\b", 'c"d', "é", "x" * 128]
    requests = [
        {"prompt": prompt, "custom_id": name, "max_tokens": 1}
        for prompt, name in zip(prompts, names, strict=True)
    ]
    assert api.submit(*requests).is_success
    stored = rows(api, "SELECT custom_id, spec FROM requests ORDER BY request_index")
    assert [row["spec"]["prompt"] for row in stored] == prompts
    assert [row["custom_id"] for row in stored] == names
