"""A service whose every free text is a payload: written by its own code, through its own doors.

Accounts, keys, grants, stops and logins come in by the dashboard's forms, Jobs and vectors by the
API, texts and errors by the writer of parts, as a worker's would. Each text is marked with what it
is (`tagged`): a account, j Job, k key of a user, o key of an operator, g grant, r reason of a stop,
n metadata name, v metadata value, c custom_id, p prompt, s stop string, t generated text, e error
code, m error message, h host, w model of a worker, d data of its engine, y outcome of its canary,
q model of a Completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import httpx

from app.accounts.accounts import create_account, create_key
from app.completions.records import store_unlisted
from app.completions.unlisted import UnlistedCompletion
from app.jobs.claims import claim_shards, finish_shard, split_off
from app.jobs.records import LeasedShard, WorkerIdentity
from app.jobs.workers import register_worker, worker_gone, worker_proved, worker_ready
from app.kit.db import Conn
from app.kit.ids import new_uuid, parse_id, public_id
from app.results.finalize import finalize_job
from app.storage import open_store
from tests.browser.loopback import Premises
from tests.browser.payloads import PAYLOADS, packed, tagged, together
from tests.fixtures.api import PEPPER
from tests.fixtures.builders import a_worker_identity
from tests.results.samples import open_part
from worker.outcomes import Choice, Errored, Outcome, Succeeded, Work
from worker.shard_run import as_result, read_work

ACCOUNT_PACKS: Final = packed(PAYLOADS, 76)  # a heading shows 80 characters
JOB_PACKS: Final = packed(PAYLOADS, 116)  # a heading shows 120, a custom_id has 128
ROUNDS: Final = packed(PAYLOADS, 240, most=8)  # the overview shows eight of each kind
LIVE_COPIES: Final = 50  # of each error of the live Job: more than any other Job has
METADATA_PAIRS: Final = 16

Answering = Callable[[Work], Outcome]


@dataclass
class House:
    """What was built: sessions of operators, public ids by the text that they carry."""

    premises: Premises
    folder: Path
    client: httpx.Client
    sessions: list[str] = field(default_factory=list)
    operators: str = ""
    accounts: dict[str, str] = field(default_factory=dict)  # by payload, and by pack
    keys: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)  # Jobs that wait, by payload
    packs: dict[str, str] = field(default_factory=dict)  # Jobs that are over, by pack
    requests: str = ""  # the Job whose single requests are looked at
    errors: str = ""  # the Job with an error of every payload
    live: str = ""  # the Job that goes on
    workers: dict[str, UUID] = field(default_factory=dict)


def build(premises: Premises, folder: Path) -> House:
    """Fill an empty database."""
    with premises.client() as asking, premises.client() as admin:
        house = House(premises, folder, asking)
        _hire(house)
        admin.cookies.set("tiller_session", house.sessions[0], path="/admin")
        _open_accounts(house, admin)
        _submit_packs(house)
        _submit_errors(house)
        _submit_requests(house)
        _submit_live(house)
        _age_jobs(house)
        _submit_named(house)
        _ask_completions(house)
        _register_workers(house)
        _stop_accounts(house, admin)
    return house


def show_round(house: House, texts: Sequence[str]) -> None:
    """Make a few payloads the newest of everything that the live pieces show."""
    live = parse_id("job", house.live)
    jobs = [parse_id("job", house.jobs[text]) for text in texts]
    workers = [house.workers[text] for text in texts]
    with house.premises.database.transaction() as conn:
        conn.execute("UPDATE jobs SET created_at = clock_timestamp() WHERE id = ANY(%s)", [jobs])
        conn.execute(
            "UPDATE jobs SET error_code = 'odd', error_message = %s WHERE id = %s",
            [tagged(together(texts), "m"), live],
        )
        conn.execute(
            """
            UPDATE workers SET heartbeat_at = now()
                - CASE WHEN id = ANY(%s) THEN interval '0' ELSE interval '30 minutes' END
            WHERE state <> 'gone'
            """,
            [workers],
        )
        for number in range(8):
            text = texts[number % len(texts)]
            conn.execute(
                """
                UPDATE requests SET error_code = %s, error_message = %s
                WHERE job_id = %s AND request_index %% 8 = %s AND state = 'errored'
                """,
                [tagged(text, "e"), tagged(text, "m"), live, number],
            )


def _hire(house: House) -> None:
    """Give every payload to an operator as the name of their key, and log each in."""
    with house.premises.database.transaction() as conn:
        account = create_account(conn, "operators")
        secrets = [
            create_key(
                conn, account, PEPPER, name=tagged(text, "o"), scopes={"admin"}, role="admin"
            ).secret
            for text in PAYLOADS
        ]
    house.operators = public_id("acct", account)
    for secret in secrets:
        house.sessions.append(house.premises.log_in(house.client, secret))
        house.client.cookies.clear()


def _open_accounts(house: House, admin: httpx.Client) -> None:
    """Create an account of every payload and of every pack, with tokens and keys."""
    for texts in [*([text] for text in PAYLOADS), *ACCOUNT_PACKS]:
        name = together(texts)
        if name in house.accounts:
            continue
        where = _send(admin, "/admin/accounts", name=tagged(name, "a"))
        account = where.rsplit("/", 1)[1].partition("?")[0]
        house.accounts[name] = account
        _grant(admin, account, "opening grant")
        owner = parse_id("acct", account)
        assert owner is not None
        with house.premises.database.transaction() as conn:
            for text in texts:
                made = create_key(conn, owner, PEPPER, name=tagged(text, "k"))
                house.keys[name] = made.secret


def _stop_accounts(house: House, admin: httpx.Client) -> None:
    """Grant once more, so that notes are the newest entries; then stop every pack's account."""
    for texts in ACCOUNT_PACKS:
        account = house.accounts[together(texts)]
        for text in texts:
            _grant(admin, account, tagged(text, "g"))
        _send(admin, f"/admin/accounts/{account}/holds/stop", reason=tagged(together(texts), "r"))


def _grant(admin: httpx.Client, account: str, note: str) -> None:
    fields = {"kind": "grant", "amount": "100000", "note": note}
    _send(admin, f"/admin/accounts/{account}/tokens", **fields)


def _send(admin: httpx.Client, path: str, **fields: str) -> str:
    answer = admin.post(path, data={"form_token": str(uuid4()), **fields})
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


def _post(house: House, owner: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the API with the key of an account; give the answer's body."""
    headers = {"authorization": f"Bearer {house.keys[owner]}"}
    answer = house.client.post(path, json=body, headers=headers)
    assert answer.status_code in (201, 202), answer.text
    made: dict[str, Any] = answer.json()
    return made


def _submit(
    house: House, owner: str, name: str, requests: list[dict[str, Any]], **fields: Any
) -> str:
    body = {"model": "tiny", "name": name, "requests": requests, **fields}
    return str(_post(house, owner, "/v1/jobs", body)["id"])


def _request(text: str, *texts: str, **fields: Any) -> dict[str, Any]:
    """Ask for a completion of a text, named by it where a custom_id may be what it is."""
    asked = {"prompt": tagged(text, "p"), "max_tokens": 4, "seed": 7, **fields}
    name = together([each for each in texts or (text,) if each.isprintable()])
    if name:
        asked["custom_id"] = tagged(name, "c")
    return asked


def _submit_packs(house: House) -> None:
    """A Job for each pack: half of its requests succeed with its texts, half fail with them."""
    for number, texts in enumerate(JOB_PACKS):
        name, owner = together(texts), together(ACCOUNT_PACKS[number])
        vector = {"name": tagged(name, "x"), "activations": [1.0 + number] * 8}
        steer = [
            {
                "vector": _post(house, owner, "/v1/steering_vectors", vector)["id"],
                "layer_indices": [1],
                "scale": 2.0,
            }
        ]
        requests = [_request(text, stop=[text], apply_steering_vectors=steer) for text in texts]
        requests += [{"prompt": "hi", "max_tokens": 1}] * len(texts)
        metadata = {tagged(text, "n"): tagged(text, "v") for text in texts}
        assert len(metadata) <= METADATA_PAIRS
        job = _submit(house, owner, tagged(name, "j"), requests, metadata=metadata)
        house.packs[name] = job

        def answer(work: Work, texts: list[str] = texts) -> Outcome:
            text = texts[work.request_index % len(texts)]
            if work.request_index < len(texts):
                return _told(tagged(text, "t"))
            return Errored(tagged(text, "e"), tagged(text, "m"))

        _work(house, job, answer)


def _submit_errors(house: House) -> None:
    """One Job with a request of every payload, which fails with it."""
    owner = together(ACCOUNT_PACKS[0])
    house.errors = _submit(house, owner, "errors", [_request(text) for text in PAYLOADS])

    def answer(work: Work) -> Outcome:
        text = PAYLOADS[work.request_index]
        return Errored(tagged(text, "e"), tagged(text, "m"))

    _work(house, house.errors, answer)


def _submit_requests(house: House) -> None:
    """One Job with a request of every pack: by turns two texts, or an error of two packs."""
    names = [together(texts) for texts in JOB_PACKS]
    requests = [
        _request(name, *texts, n=2, stop=[tagged(text, "s") for text in texts[:4]])
        for name, texts in zip(names, JOB_PACKS, strict=True)
    ]
    house.requests = _submit(house, together(ACCOUNT_PACKS[1]), "requests", requests)

    def answer(work: Work) -> Outcome:
        first, second = pair_of(names, work.request_index)
        if work.request_index % 2 == 0:
            return _told(tagged(first, "t"), tagged(second, "t"))
        return Errored(tagged(first, "e"), together([tagged(first, "m"), tagged(second, "m")]))

    _work(house, house.requests, answer)


def pair_of(names: Sequence[str], index: int) -> tuple[str, str]:
    """Give the two packs that the request of this index came to; over two, each comes twice."""
    first = index - index % 2
    return names[first], names[(first + 1) % len(names)]


def _submit_live(house: House) -> None:
    """One Job that has failed a lot and has a request to go."""
    count = 8 * LIVE_COPIES
    requests = [{"prompt": "hi", "max_tokens": 1}] * (count + 1)
    house.live = _submit(house, together(ACCOUNT_PACKS[2]), "live", requests)
    _work(house, house.live, lambda _: Errored("odd", "It failed."), up_to=count)


def _submit_named(house: House) -> None:
    for text in PAYLOADS:
        requests = [{"prompt": "hi", "max_tokens": 1}]
        house.jobs[text] = _submit(house, text, tagged(text, "j"), requests)


def _age_jobs(house: House) -> None:
    """Let the Jobs so far be of yesterday, but for the live one."""
    with house.premises.database.transaction() as conn:
        conn.execute(
            "UPDATE jobs SET created_at = created_at - interval '1 day' WHERE id <> %s",
            [parse_id("job", house.live)],
        )


def _ask_completions(house: House) -> None:
    """Completions that wait, of models that no models.toml names."""
    with house.premises.database.transaction() as conn:
        for texts in ACCOUNT_PACKS:
            owner = parse_id("acct", house.accounts[together(texts)])
            assert owner is not None
            for text in texts:
                asked = UnlistedCompletion(tagged(text, "q"), {"prompt": text}, 5, 9)
                store_unlisted(conn, owner, asked, seconds=3600)


def _register_workers(house: House) -> None:
    """A worker of every payload that is there; and some that are gone, of two payloads each."""
    pairs = zip(PAYLOADS[::2], PAYLOADS[1::2], strict=False)
    with house.premises.database.transaction() as conn:
        for text in PAYLOADS:
            house.workers[text] = _register(conn, host=text, model=text)
        for host, model in (*pairs, (PAYLOADS[-1], PAYLOADS[-1])):
            worker_gone(conn, _register(conn, host=host, model=model))


def _register(conn: Conn, *, host: str, model: str) -> UUID:
    data = tagged(host, "d")
    worker = WorkerIdentity(
        worker_id=new_uuid(),
        model=tagged(model, "w"),
        model_revision=data,
        dtype=data,
        engine=data,
        host=tagged(host, "h"),
        pid=1,
    )
    register_worker(conn, worker)
    worker_ready(conn, worker, mode=data)
    worker_proved(conn, worker.worker_id, tagged(host, "y"))
    return worker.worker_id


def _told(*texts: str) -> Succeeded:
    """Answer with these texts, one a choice."""
    return Succeeded(tuple(Choice(i, text, (7, 8), "stop") for i, text in enumerate(texts)))


def _work(house: House, job: str, answer: Answering, up_to: int | None = None) -> None:
    """Lease the shards of the only Job that waits, and publish what `answer` says."""
    database = house.premises.database
    store = open_store(house.premises.settings.object_store)
    worker = a_worker_identity()
    with database.transaction() as conn:
        register_worker(conn, worker)
        worker_ready(conn, worker, mode="eager")
    while shard := _lease(house, worker, up_to):
        assert public_id("job", shard.job_id) == job
        part = open_part(shard, store, house.folder / "spool")
        work = read_work(database, shard)
        results = [as_result(item, part.add(item, answer(item))) for item in work]
        published = part.close()
        with database.transaction() as conn:
            assert finish_shard(conn, shard, results, published)
        finalize_job(database, store, shard.job_id)
    with database.transaction() as conn:
        conn.execute("DELETE FROM workers WHERE id = %s", [worker.worker_id])


def _lease(house: House, worker: WorkerIdentity, up_to: int | None) -> LeasedShard | None:
    """Lease the next shard, cut at `up_to`; None when nothing is left to do."""
    with house.premises.database.transaction() as conn:
        shards = claim_shards(conn, worker, lease_seconds=60.0, shards_max=1)
        if not shards:
            return None
        (shard,) = shards
        if up_to is not None and shard.end_index > up_to:
            return split_off(conn, shard, up_to)
        return shard
