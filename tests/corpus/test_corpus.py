"""Every bad input of the corpus, against the real API: a clear 4xx, and nothing has changed."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from app.accounts.accounts import create_key, revoke_key
from app.accounts.keys import mint_key
from tests.corpus.cases import Case, body_of, encoded, read_cases
from tests.fixtures.api import PEPPER, Api

CASES = read_cases()
READER = frozenset({"jobs:read"})
WRITER = frozenset({"jobs:write"})


@pytest.fixture(scope="module")
def names(shared_api: Api) -> dict[str, str]:
    """Make what cases refer to: a Job, keys of every kind, another account's vector."""
    api = shared_api
    job = api.submit(headers={"idempotency-key": "used"})
    other = api.as_other()
    steered = {
        "prompt": "hi",
        "apply_steering_vectors": [
            {"activations": encoded(shape=[1, 8], value=7), "layer_indices": [1]}
        ],
    }
    foreign = api.submit(steered, headers={"authorization": f"Bearer {other}"})
    assert (job.status_code, foreign.status_code) == (202, 202)
    with api.database.transaction() as conn:
        row = conn.execute("SELECT encode(digest, 'hex') AS name FROM vectors").fetchone()
        revoked = create_key(conn, api.account_id, PEPPER, name="revoked")
        revoke_key(conn, api.account_id, revoked.id)
        past = datetime.now(UTC) - timedelta(seconds=1)
        expired = create_key(conn, api.account_id, PEPPER, name="expired", expires_at=past)
        reader = create_key(conn, api.account_id, PEPPER, name="reader", scopes=READER)
        writer = create_key(conn, api.account_id, PEPPER, name="writer", scopes=WRITER)
    assert row is not None
    return {
        "job": job.json()["id"],
        "used_key": "used",
        "key": api.key,
        "cut": api.key[:-1],
        "upper": api.key.upper(),
        "unknown": mint_key(),
        "long": "sk_live_" + "0" * 1_000_000,
        "other": other,
        "revoked": revoked.secret,
        "expired": expired.secret,
        "reader": reader.secret,
        "writer": writer.secret,
        "foreign_vector": f"sv_{row['name']}",
    }


def test_the_corpus_has_no_two_cases_of_one_name() -> None:
    all_names = [case.name for case in CASES]
    assert len(all_names) == len(set(all_names))
    assert len(all_names) >= 100


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_gets_a_clear_answer_and_changes_nothing(
    shared_api: Api, names: dict[str, str], case: Case
) -> None:
    before = shared_api.numbers()
    answer = send(shared_api, case, names)
    check_envelope(answer, case)
    assert shared_api.numbers() == before
    assert shared_api.submit().status_code == 202


def send(api: Api, case: Case, names: dict[str, str]) -> httpx.Response:
    """Send a case as it is."""
    data = case.data
    method = data.get("method", "POST")
    path = fill(data.get("path", "/v1/jobs"), names)
    content: Any = body_of(data, names) if method == "POST" else b""
    if "chunks" in data:
        size, count = data["chunks"]
        content = (b" " * size for _ in range(count))
    request = api.client.build_request(method, path, content=content)
    lines = request.headers.multi_items()
    for name, value in data.get("headers", {}).items():
        lines = [line for line in lines if line[0].lower() != name]
        values = value if isinstance(value, list) else [] if value is None else [value]
        lines += [(name, fill(item, names)) for item in values]
    request.headers = type(request.headers)([(k.encode(), v.encode()) for k, v in lines])
    return api.client.send(request)


def fill(text: str, names: dict[str, str]) -> str:
    """Fill {name} in, leaving all other braces alone."""
    return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[0]), text)


def check_envelope(answer: httpx.Response, case: Case) -> None:
    """Check status, envelope, id, and what the case expects of the error."""
    shown = answer.text[:600]
    assert answer.status_code == case.status, shown
    content = answer.json()
    assert re.fullmatch(r"req_[0-9a-f]{32}", content["request_id"]), shown
    assert answer.headers["x-request-id"] == content["request_id"]
    error = content["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["code"] == case.code, shown
    if case.param is not None:
        assert error["param"] == case.param, shown
    assert case.data.get("says", "") in error["message"], shown
    assert len(error["message"]) < 1000
    if case.status == 405:
        assert answer.headers["allow"]
    if case.status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
