"""What is not there, and methods that a path does not take: the same words on every route."""

import pytest

from tests.fixtures.api import Api

NO_JOB = "job_" + "0" * 32


@pytest.mark.parametrize("job", [NO_JOB, "x", "job_" + "A" * 32])
def test_every_route_of_a_job_says_the_same_when_there_is_none(api: Api, job: str) -> None:
    own = api.submit().json()["id"]
    other = {"authorization": f"Bearer {api.as_other()}"}
    for asked, headers in ((job, {}), (own, other)):
        answers = [
            api.client.request(method, f"/v1/jobs/{asked}{rest}", headers=headers)
            for method, rest in [
                ("GET", ""),
                ("GET", "?wait=1"),
                ("POST", "/cancel"),
                ("GET", "/requests"),
                ("GET", "/requests/0"),
                ("GET", "/manifest"),
                ("GET", "/files/manifest.json"),
            ]
        ]
        assert {answer.status_code for answer in answers} == {404}
        (error,) = {tuple(answer.json()["error"].items()) for answer in answers}
        assert dict(error)["param"] == "job_id"
        assert dict(error)["message"] == f"There is no Job {asked!r} in this account."


@pytest.mark.parametrize(
    "index", ["00", "01", "+0", "0 ", "-1", "1", "0x0", "\u0660", "0.0", "9" * 30]
)
def test_a_request_is_found_by_its_number_as_it_is_written(api: Api, index: str) -> None:
    job = api.submit().json()["id"]
    assert api.client.get(f"/v1/jobs/{job}/requests/0").status_code == 200
    answer = api.client.get(f"/v1/jobs/{job}/requests/{index}")
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "index"
    after = api.client.get(f"/v1/jobs/{job}/requests", params={"after": f"{job}-0{index}"})
    assert (after.status_code, after.json()["error"]["param"]) == (400, "after")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", "/v1/jobs", "GET, POST"),
        ("POST", "/v1/jobs/x", "GET"),
        ("GET", "/v1/jobs/x/cancel", "POST"),
        ("PUT", "/v1/jobs/x/manifest", "GET, HEAD"),
        ("POST", "/v1/jobs/x/files/a/b", "GET, HEAD"),
        ("PUT", "/v1/steering_vectors", "GET, POST"),
        ("PUT", "/v1/steering_vectors/x", "DELETE, GET"),
        ("POST", "/v1/steering_vectors/x/content", "GET, HEAD"),
        ("GET", "/v1/tokenize", "POST"),
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/v1/usage", "GET"),
        ("POST", "/v1/limits", "GET"),
    ],
)
def test_a_wrong_method_is_answered_with_those_that_the_path_takes(
    api: Api, method: str, path: str, allow: str
) -> None:
    answer = api.client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allow
    assert allow in answer.json()["error"]["message"]


def test_head_of_a_vector_says_what_get_would(api: Api) -> None:
    made = api.client.post("/v1/steering_vectors", json={"activations": [1.0, 2.0]}).json()["id"]
    path = f"/v1/steering_vectors/{made}/content"
    got, head = api.client.get(path), api.client.head(path)
    assert (got.status_code, head.status_code) == (200, 200)
    own = {"x-request-id"}
    assert {k: v for k, v in head.headers.items() if k not in own} == {
        k: v for k, v in got.headers.items() if k not in own
    }
    assert len(got.content) == int(head.headers["content-length"])
