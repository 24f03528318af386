"""A deletion and a Job that uses the vector, at the same moment: one of them is first."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from app.errors import ConflictError
from app.kit.db import Conn, Database
from app.steering.vectors import link_vectors, store_vectors
from app.vectors.stored import delete_stored, store_upload
from app.vectors.upload import Upload
from tests.checker import check_everything
from tests.fixtures.api import Api
from tests.fixtures.builders import insert_job
from tests.steering.test_vectors import a_vector

PATH = "/v1/steering_vectors"
ROW = [1.0] * 8


def begin(work: Callable[[], Any]) -> Future[Any]:
    """Run work in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised by result())
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


def wait_for_a_lock(database: Database) -> None:
    """Wait until some session waits for a lock."""
    deadline = time.monotonic() + 10
    query = (
        "SELECT count(*) AS waiting FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    while True:
        with database.transaction() as conn:
            row = conn.execute(query).fetchone()
        if row is not None and row["waiting"]:
            return
        assert time.monotonic() < deadline, "nobody waits"


def steered(vector: dict[str, Any]) -> dict[str, Any]:
    """A request that is steered at layer 1."""
    return {"prompt": "hi", "apply_steering_vectors": [{**vector, "layer_indices": [1]}]}


def count(database: Database, table: str) -> int:
    """Count rows."""
    with database.transaction() as conn:
        row = conn.execute(f"SELECT count(*) AS n FROM {table}").fetchone()  # type: ignore[arg-type]
    assert row is not None
    return int(row["n"])


def test_a_deletion_waits_for_a_job_that_is_being_stored_and_is_refused(
    database: Database, builders: Any
) -> None:
    account, vector = builders.an_account(), a_vector()
    with database.transaction() as conn:
        store_vectors(conn, account, [vector])

    def delete(conn: Conn) -> bool:
        return delete_stored(conn, account, vector.name)

    with database.transaction() as storing:
        job = insert_job(storing, account)
        link_vectors(storing, account, job.id, [vector.name])
        deletion = begin(lambda: database.run(delete))
        wait_for_a_lock(database)
    with pytest.raises(ConflictError) as refused:
        deletion.result(20)
    assert refused.value.code == "vector_in_use"
    assert count(database, "vectors") == count(database, "job_vectors") == 1
    check_everything(database)


def test_a_deletion_goes_through_when_the_job_that_it_waited_for_is_not_stored(
    database: Database, builders: Any
) -> None:
    account, vector = builders.an_account(), a_vector()
    with database.transaction() as conn:
        store_vectors(conn, account, [vector])
    with database.transaction() as storing:
        store_vectors(storing, account, [vector])
        deletion = begin(
            lambda: database.run(lambda conn: delete_stored(conn, account, vector.name))
        )
        wait_for_a_lock(database)
        storing.rollback()
    assert deletion.result(20) is True
    assert count(database, "vectors") == 0


def submitted_during_a_deletion(api: Api, name: str, vector: dict[str, Any]) -> httpx.Response:
    """Post a Job while its vector is being deleted; the deletion commits first."""
    with api.database.transaction() as deleting:
        assert delete_stored(deleting, api.account_id, name)
        submission = begin(lambda: api.submit(steered(vector)))
        wait_for_a_lock(api.database)
    answer: httpx.Response = submission.result(20)
    return answer


def test_a_job_with_the_numbers_stores_them_again(api: Api) -> None:
    name = api.client.post(PATH, json={"activations": [ROW]}).json()["id"]
    answer = submitted_during_a_deletion(api, name, {"activations": [ROW]})
    assert answer.status_code == 202, answer.text
    assert count(api.database, "job_vectors") == 1
    assert api.client.get(f"{PATH}/{name}").json()["interned"] is True
    check_everything(api.database)


def test_a_job_with_the_name_is_refused_and_nothing_of_it_is_stored(api: Api) -> None:
    name = api.client.post(PATH, json={"activations": [ROW]}).json()["id"]
    before = api.numbers()
    answer = submitted_during_a_deletion(api, name, {"vector": name})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "vector_deleted")
    assert name in error["message"]
    assert api.numbers() == {**before, "vectors": 0}
    check_everything(api.database)


def test_numbers_that_somebody_else_stores_at_the_same_time_are_held_for_the_job(
    database: Database, builders: Any
) -> None:
    account, vector = builders.an_account(), a_vector()
    job = builders.a_job(account_id=account)
    stored, deletion_waits = threading.Event(), threading.Event()

    def store_and_link(conn: Conn) -> None:
        store_vectors(conn, account, [vector])
        stored.set()
        assert deletion_waits.wait(20)
        link_vectors(conn, account, job.id, [vector.name])

    with database.transaction() as uploading:
        store_upload(uploading, account, Upload(vector))
        storing = begin(lambda: database.run(store_and_link, attempts=1))
        wait_for_a_lock(database)  # for the upload, which is first and now commits
    assert stored.wait(20)
    deletion = begin(lambda: database.run(lambda conn: delete_stored(conn, account, vector.name)))
    wait_for_a_lock(database)
    deletion_waits.set()
    storing.result(20)
    with pytest.raises(ConflictError) as refused:
        deletion.result(20)
    assert refused.value.code == "vector_in_use"
    check_everything(database)


def test_any_order_of_uploads_deletions_and_jobs_leaves_every_job_its_vector(api: Api) -> None:
    name = api.client.post(PATH, json={"activations": [ROW]}).json()["id"]
    start = threading.Barrier(6)

    def repeat(send: Callable[[], httpx.Response], allowed: set[int]) -> None:
        start.wait(20)
        for _ in range(8):
            answer = send()
            assert answer.status_code in allowed, answer.text

    def upload() -> httpx.Response:
        return api.client.post(PATH, json={"activations": [ROW]})

    def delete() -> httpx.Response:
        return api.client.delete(f"{PATH}/{name}")

    works = [
        begin(lambda: repeat(upload, {200, 201})),
        begin(lambda: repeat(delete, {200, 404, 409})),
        begin(lambda: repeat(delete, {200, 404, 409})),
        begin(lambda: repeat(lambda: api.submit(steered({"activations": [ROW]})), {202})),
        begin(lambda: repeat(lambda: api.submit(steered({"vector": name})), {202, 400, 409})),
        begin(lambda: repeat(lambda: api.submit(steered({"activations": [[2.0] * 8]})), {202})),
    ]
    for work in works:
        work.result(60)
    assert count(api.database, "job_vectors") == count(api.database, "jobs") >= 16
    check_everything(api.database)
