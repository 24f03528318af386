"""Stored vectors: lists, facts, content, deletion, and who may do what."""

from typing import Any

import httpx
import numpy as np
import pytest

from app.jobs.lifecycle import cancel_job
from app.kit.ids import parse_id
from tests.fixtures.api import Api

PATH = "/v1/steering_vectors"
UNKNOWN = "sv_" + "0" * 64
NOT_FOUND = ["sv_", "sv_" + "0" * 63, "sv_" + "A" * 64, UNKNOWN, "0" * 64, "sv_" + "0" * 65, "%00"]


def put(api: Api, value: float, **fields: Any) -> dict[str, Any]:
    """Store a vector of four equal numbers."""
    answer = api.client.post(PATH, json={"activations": [value] * 4, **fields})
    assert answer.status_code in (200, 201), answer.text
    stored: dict[str, Any] = answer.json()
    return stored


def steered(*vectors: dict[str, Any]) -> dict[str, Any]:
    """A request that is steered at layer 1."""
    return {
        "prompt": "hi",
        "apply_steering_vectors": [{"layer_indices": [1], **vector} for vector in vectors],
    }


def ids(answer: httpx.Response) -> list[str]:
    """The ids of a page."""
    return [item["id"] for item in answer.json()["data"]]


def test_a_stored_vector_is_described(api: Api) -> None:
    rows = [[3.0, -4.0], [0.0, 0.0], [1e38, 1e38]]
    sent = {"activations": rows, "name": "a direction", "metadata": {"layer": "7"}}
    created = api.client.post(PATH, json=sent)
    stored = created.json()
    assert created.status_code == 201
    assert created.headers["location"] == f"{PATH}/{stored['id']}"
    assert stored["object"] == "steering_vector"
    assert (stored["dtype"], stored["shape"], stored["bytes"]) == ("float32", [3, 2], 24)
    assert (stored["name"], stored["metadata"]) == ("a direction", {"layer": "7"})
    assert stored["interned"] is False
    facts = api.client.get(created.headers["location"]).json()
    assert {name: facts[name] for name in stored} == stored
    assert facts["rows"] == 3
    assert facts["norms"] == pytest.approx([5.0, 0.0, 2**0.5 * 1e38])
    assert facts["largest"] == pytest.approx(1e38)


def test_norms_are_listed_for_the_first_rows_only(api: Api) -> None:
    created = api.client.post(PATH, json={"activations": [[1.0]] * 5000})
    facts = api.client.get(f"{PATH}/{created.json()['id']}").json()
    assert (facts["rows"], len(facts["norms"])) == (5000, 4096)


def test_the_same_numbers_again_are_the_same_vector_under_its_newest_name(api: Api) -> None:
    first = put(api, 1, name="first", metadata={"a": "b"})
    same = put(api, 1)
    assert same == first
    renamed = put(api, 1, name="second")
    assert renamed == {**first, "name": "second"}
    assert api.numbers()["vectors"] == 1


def test_content_is_not_sent_again_to_who_has_it(api: Api) -> None:
    url = f"{PATH}/{put(api, 1)['id']}/content"
    answer = api.client.get(url)
    assert answer.headers["content-type"] == "application/x-npy"
    assert np.frombuffer(answer.content[-16:], "<f4").tolist() == [1, 1, 1, 1]
    again = api.client.get(url, headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_lists_go_page_by_page_in_both_orders(api: Api) -> None:
    made = [put(api, number)["id"] for number in range(5)]
    for order, expected in (("asc", made), ("desc", made[::-1])):
        seen: list[str] = []
        query = {"order": order, "limit": "2"}
        for _ in range(3):
            page = api.client.get(PATH, params=query)
            seen += ids(page)
            query["after"] = page.json()["last_id"]
        assert seen == expected
        assert page.json()["has_more"] is False
    assert ids(api.client.get(PATH)) == made[::-1]
    for wrong in (UNKNOWN, "sv_x", "job_" + "0" * 32, "1"):
        answer = api.client.get(PATH, params={"after": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


def test_lists_tell_uploads_from_what_jobs_brought_along(api: Api) -> None:
    uploaded = put(api, 7)["id"]
    row = [float(number) for number in range(8)]
    assert api.submit(steered({"activations": [row]})).status_code == 202
    everything = api.client.get(PATH).json()["data"]
    assert sorted(item["interned"] for item in everything) == [False, True]
    assert ids(api.client.get(PATH, params={"interned": "false"})) == [uploaded]
    (interned,) = ids(api.client.get(PATH, params={"interned": "true"}))
    answer = api.client.post(PATH, json={"activations": [row], "name": "mine now"})
    assert (answer.status_code, answer.json()["id"]) == (200, interned)
    assert len(ids(api.client.get(PATH, params={"interned": "false"}))) == 2
    wrong = api.client.get(PATH, params={"interned": "maybe"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "interned")


def test_a_vector_in_use_stays_until_its_last_job_ends(api: Api) -> None:
    name = api.client.post(PATH, json={"activations": [[1.0] * 8]}).json()["id"]
    jobs = [api.submit(steered({"vector": name})).json()["id"] for _ in range(5)]
    refused = api.client.delete(f"{PATH}/{name}")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (409, "vector_in_use")
    assert sum(job in error["message"] for job in jobs) == 3
    assert "and more" in error["message"]
    for job in jobs:
        assert api.client.delete(f"{PATH}/{name}").status_code == 409
        finish(api, job)
    deleted = api.client.delete(f"{PATH}/{name}")
    assert deleted.status_code == 200
    assert deleted.json() == {"id": name, "object": "steering_vector", "deleted": True}
    assert api.client.delete(f"{PATH}/{name}").status_code == 404
    gone = api.submit(steered({"vector": name}))
    assert gone.status_code == 400
    assert "does not have" in gone.json()["error"]["message"]


def finish(api: Api, job: str) -> None:
    """Cancel a Job that no worker has begun, and end it."""
    job_id = parse_id("job", job)
    assert job_id is not None
    with api.database.transaction() as conn:
        cancel_job(conn, job_id)
        conn.execute(
            "UPDATE jobs SET state = 'cancelled', ended_running_at = now(), finished_at = now() "
            "WHERE id = %s",
            (job_id,),
        )


@pytest.mark.parametrize("wrong", NOT_FOUND)
def test_what_is_no_vector_of_the_account_is_404(api: Api, wrong: str) -> None:
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = api.client.request(method, f"{PATH}/{wrong}{path}")
        assert answer.status_code == 404, answer.text
        assert answer.json()["error"]["code"] == "not_found"


def test_vectors_are_private_to_the_account(api: Api) -> None:
    name = put(api, 1)["id"]
    other = {"authorization": f"Bearer {api.as_other()}"}
    assert ids(api.client.get(PATH, headers=other)) == []
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = api.client.request(method, f"{PATH}/{name}{path}", headers=other)
        assert answer.status_code == 404
    assert api.client.get(PATH, params={"after": name}, headers=other).status_code == 400
    theirs = api.client.post(PATH, json={"activations": [1.0] * 4}, headers=other)
    assert (theirs.status_code, theirs.json()["id"]) == (201, name)
    assert api.client.delete(f"{PATH}/{name}", headers=other).status_code == 200
    assert api.client.get(f"{PATH}/{name}").status_code == 200


def test_writing_needs_the_scope_and_reading_any_key(api: Api) -> None:
    name = put(api, 1)["id"]
    with api.database.transaction() as conn:
        conn.execute("UPDATE api_keys SET scopes = ARRAY['completions']")
    for method, path in (("POST", PATH), ("DELETE", f"{PATH}/{name}")):
        answer = api.client.request(method, path, json={"activations": [1.0]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
    for path in (PATH, f"{PATH}/{name}", f"{PATH}/{name}/content"):
        assert api.client.get(path).status_code == 200
        assert api.client.get(path, headers={"authorization": ""}).status_code == 401


def test_a_key_gives_the_first_answer_again(api: Api) -> None:
    headers = {"idempotency-key": "one"}
    sent = {"activations": [1.0, 2.0], "name": "first"}
    first = api.client.post(PATH, json=sent, headers=headers)
    put_again = api.client.post(PATH, json=sent, headers=headers)
    assert (first.status_code, put_again.status_code) == (201, 201)
    assert put_again.content == first.content
    assert put_again.headers["location"] == first.headers["location"]
    assert put_again.headers["idempotent-replayed"] == "true"
    other = api.client.post(PATH, json={"activations": [3.0]}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert api.numbers()["vectors"] == 1
