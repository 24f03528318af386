"""Reading Jobs: lists, waits, counts, requests, cancel; all through the API."""

import threading
import time
from typing import Any
from uuid import UUID

import pytest

from app.jobs.claims import finish_shard
from app.jobs.records import PublishedPart
from app.kit.ids import parse_id
from tests.fixtures.api import Api
from tests.fixtures.builders import Builders, errored, succeeded


def job_of(api: Api, job_id: str, **query: str) -> dict[str, Any]:
    answer = api.client.get(f"/v1/jobs/{job_id}", params=query)
    assert answer.status_code == 200
    content: dict[str, Any] = answer.json()
    return content


def test_jobs_are_listed_newest_first_page_by_page(api: Api) -> None:
    ids = [api.submit(name=f"job {number}").json()["id"] for number in range(5)]
    pages: list[list[str]] = []
    after: dict[str, str] = {}
    while True:
        page = api.client.get("/v1/jobs", params={"limit": "2", **after}).json()
        pages.append([job["id"] for job in page["data"]])
        assert page["first_id"] == pages[-1][0]
        assert page["last_id"] == pages[-1][-1]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert [len(page) for page in pages] == [2, 2, 1]
    assert [job_id for page in pages for job_id in page] == ids[::-1]
    oldest = api.client.get("/v1/jobs", params={"order": "asc", "limit": "1"}).json()
    assert oldest["data"][0]["id"] == ids[0]


def test_lists_can_be_filtered(api: Api) -> None:
    kept, cancelled = (api.submit().json()["id"] for _ in range(2))
    api.client.post(f"/v1/jobs/{cancelled}/cancel")
    found = api.client.get("/v1/jobs", params={"status": "queued"}).json()["data"]
    assert [job["id"] for job in found] == [kept]
    assert api.client.get("/v1/jobs", params={"model": "other"}).json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


def test_another_account_sees_none_of_it(api: Api) -> None:
    job_id = api.submit().json()["id"]
    headers = {"authorization": f"Bearer {api.as_other()}"}
    assert api.client.get("/v1/jobs", headers=headers).json()["data"] == []
    assert api.client.get(f"/v1/jobs/{job_id}", headers=headers).status_code == 404
    answer = api.client.post(f"/v1/jobs/{job_id}/cancel", headers=headers)
    assert answer.status_code == 404
    assert job_of(api, job_id)["status"] == "queued"


def test_counts_follow_a_shard_through_its_lease(api: Api, builders: Builders) -> None:
    job_id = api.submit(*({"prompt": "a"} for _ in range(4))).json()["id"]
    assert job_of(api, job_id)["status_reason"]["code"] == "no_worker"
    worker = builders.a_worker()
    assert job_of(api, job_id)["status_reason"] is None
    shard = builders.a_lease(worker)
    leased = job_of(api, job_id)
    assert leased["status"] == "in_progress"
    assert leased["request_counts"]["running"] == 4
    listed = api.client.get(f"/v1/jobs/{job_id}/requests", params={"status": "running"}).json()
    assert [item["request_index"] for item in listed["data"]] == [0, 1, 2, 3]
    with api.database.transaction() as conn:
        results = [*succeeded([0, 1, 2], completion_tokens=5), *errored([3])]
        assert finish_shard(conn, shard, results, PublishedPart(()))
    done = job_of(api, job_id)
    counts = done["request_counts"]
    assert (counts["succeeded"], counts["errored"], counts["running"]) == (3, 1, 0)
    assert done["progress"]["percent"] == 100
    assert done["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 15,
        "total_tokens": 21,
        "held": 0,
        "charged": 21,
        "released": 4 * 18 - 21,
    }
    assert done["error_summary"] == [
        {
            "code": "steering_failed",
            "count": 1,
            "example_index": 3,
            "example_message": "It failed.",
        }
    ]
    request = api.client.get(f"/v1/jobs/{job_id}/requests/0").json()
    assert request["hold"] == {"amount": 18, "state": "settled", "charged": 7}
    failed = api.client.get(f"/v1/jobs/{job_id}/requests", params={"status": "errored"}).json()
    assert [item["error"]["code"] for item in failed["data"]] == ["steering_failed"]


def test_the_parts_of_the_accounting_add_up(api: Api, builders: Builders) -> None:
    job_id = api.submit().json()["id"]
    builders.a_lease()
    parts = job_of(api, job_id)["accounting"]
    total = parts.pop("total")
    assert set(parts) == {"queued", "engine_start", "running", "publishing", "rest"}
    assert sum(parts.values()) == pytest.approx(total, abs=0.002)
    assert min(parts.values()) >= -0.002


def test_cancel_ends_waiting_requests_and_can_be_repeated(api: Api) -> None:
    job_id = api.submit(*({"prompt": "a"} for _ in range(3))).json()["id"]
    for _ in range(2):
        answer = api.client.post(f"/v1/jobs/{job_id}/cancel")
        assert answer.status_code == 200
        job = answer.json()
        assert job["status"] in ("cancelling", "cancelled")
        assert job["request_counts"]["cancelled"] == 3
        assert (job["usage"]["held"], job["usage"]["released"]) == (0, 3 * 18)
    assert api.client.get("/v1/usage").json()["held"] == 0
    request = api.client.get(f"/v1/jobs/{job_id}/requests/2").json()
    assert (request["status"], request["hold"]["state"]) == ("cancelled", "released")


def test_requests_are_paged_in_order_and_found_by_their_name(api: Api) -> None:
    job_id = api.submit(
        *({"prompt": "a", "custom_id": f"name {number}"} for number in range(5))
    ).json()["id"]
    path = f"/v1/jobs/{job_id}/requests"
    first = api.client.get(path, params={"limit": "3"}).json()
    rest = api.client.get(path, params={"limit": "3", "after": first["last_id"]}).json()
    assert [item["request_index"] for item in first["data"] + rest["data"]] == [0, 1, 2, 3, 4]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    found = api.client.get(path, params={"custom_id": "name 3"}).json()["data"]
    assert [item["request_index"] for item in found] == [3]


def test_a_wait_ends_when_the_job_changes(api: Api) -> None:
    job_id = api.submit().json()["id"]
    answers: list[Any] = []
    state = api.client.app.state  # type: ignore[attr-defined]  # it is our application

    def wait() -> None:
        answers.append(job_of(api, job_id, wait="30"))

    waiter = threading.Thread(target=wait)
    waiter.start()
    deadline = time.monotonic() + 20
    while state.waiters == 0:  # it has read the Job as it was
        assert time.monotonic() < deadline
        time.sleep(0.01)
    api.client.post(f"/v1/jobs/{job_id}/cancel")
    waiter.join(timeout=10)
    assert not waiter.is_alive()
    assert answers[0]["status"] in ("cancelling", "cancelled")


def test_a_wait_ends_at_its_time_with_the_job_as_it_is(api: Api) -> None:
    job_id = api.submit().json()["id"]
    assert job_of(api, job_id, wait="1")["status"] == "queued"


def test_an_etag_changes_with_the_job_and_spares_the_body_until_then(api: Api) -> None:
    job_id = api.submit().json()["id"]
    path = f"/v1/jobs/{job_id}"
    first = api.client.get(path)
    same = api.client.get(path, headers={"if-none-match": first.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    api.client.post(f"{path}/cancel")
    changed = api.client.get(
        path, params={"wait": "30"}, headers={"if-none-match": first.headers["etag"]}
    )
    assert changed.status_code == 200
    assert changed.headers["etag"] != first.headers["etag"]


def test_a_single_request_shows_what_it_asked_for(api: Api) -> None:
    job_id = api.submit({"prompt": "hi", "output_residual_stream": True}).json()["id"]
    request = api.client.get(f"/v1/jobs/{job_id}/requests/0").json()
    assert request["spec"]["captures"] == [
        {"name": "residual_stream", "site": "resid_post", "layers": [0, 1, 2, 3]}
    ]
    assert isinstance(parse_id("job", request["job_id"]), UUID)
