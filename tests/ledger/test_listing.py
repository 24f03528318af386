"""GET /v1/ledger and the Holds in GET /v1/usage: an account sees its own tokens' whole story."""

from app.completions.records import Failure as Why
from app.completions.records import (
    claim_completion,
    fail_completion,
    store_completion,
    succeed_completion,
)
from app.kit.ids import new_uuid
from tests.fixtures.api import a_key, api
from tests.fixtures.builders import a_spec

__all__ = ["api"]


def a_completion(database, account_id):
    completion_id = new_uuid()
    with database.transaction() as conn:
        store_completion(
            conn, account_id, completion_id, model="tiny", specs=[a_spec()], seconds=60
        )
    return completion_id


def pages(api, **query):
    """Read all pages of two."""
    found, after = [], None
    while True:
        params = {"limit": 2, **query} | ({} if after is None else {"after": after})
        page = api.client.get("/v1/ledger", params=params).json()
        found += page["data"]
        after = page["last_id"]
        if not page["has_more"]:
            return found


def test_open_completions_are_listed_with_what_they_hold(api, builders):
    first, second = (a_completion(api.database, api.account_id) for _ in range(2))
    with api.database.transaction() as conn:
        claim_completion(conn, second, builders.a_worker().worker_id, model="tiny")
    usage = api.client.get("/v1/usage").json()
    holds = usage["completion_holds"]
    assert [(item["completion_id"], item["status"]) for item in holds] == [
        (f"cmpl-{second.hex}", "running"),
        (f"cmpl-{first.hex}", "pending"),
    ]
    assert sum(item["tokens_held"] for item in holds) == usage["held"] == 18
    with api.database.transaction() as conn:
        for each in (first, second):
            fail_completion(conn, each, Why("engine_error", "It failed."))
    assert api.client.get("/v1/usage").json()["completion_holds"] == []


def test_the_ledger_lists_every_entry_of_the_account_alone(api, builders):
    other, _ = a_key(api.database)
    worker = builders.a_worker().worker_id
    done = a_completion(api.database, api.account_id)
    failed = a_completion(api.database, api.account_id)
    strange = a_completion(api.database, other)
    with api.database.transaction() as conn:
        for each in (done, strange):
            claim_completion(conn, each, worker, model="tiny")
            assert succeed_completion(conn, each, worker, 2)
        fail_completion(conn, failed, Why("engine_error", "It failed."))
    job = api.submit({"prompt": "hi"}).json()["id"]
    api.client.post(f"/v1/jobs/{job}/cancel")
    entries = pages(api)
    assert [(item["kind"], item["tokens"]) for item in entries[:1]] == [("release", 19)]
    assert (entries[0]["job_id"], entries[0]["request_index"]) == (job, 0)
    assert [(item["kind"], item["tokens"], item["completion_id"]) for item in entries[1:]] == [
        ("release", 9, f"cmpl-{failed.hex}"),
        ("settle", 7, f"cmpl-{done.hex}"),
        ("grant", 1_000_000, None),
    ]
    assert entries[2]["tokens_held"] == 9
    assert entries[3]["note"] == "opening grant"
    assert pages(api, order="asc") == entries[::-1]
    usage = api.client.get("/v1/usage").json()
    assert sum(item["balance_change"] for item in entries) == usage["balance"]


def test_a_cursor_must_be_an_entry_of_the_account(api):
    other, _ = a_key(api.database)
    with api.database.transaction() as conn:
        row = conn.execute("SELECT id FROM entries WHERE account_id = %s", [other]).fetchone()
    assert row is not None
    for after in ("entry_0", "entry_x", "7", f"entry_{row['id']}"):
        answer = api.client.get("/v1/ledger", params={"after": after})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")
