"""A whole service with something to see: Jobs that run, ended, erred, were cancelled or captured.

It is `tiller up` as anyone starts it, around a real engine. Everything is set up as a user and an
admin would: Jobs through the API, accounts and keys through the forms of the dashboard.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self
from unittest import mock
from uuid import uuid4

import httpx
from playwright.sync_api import StorageState

from app.admin.access import COOKIE, ROLES
from tests.engine.tiny_model import make_tiny_llama
from tiller.client import Client
from tiller.local_stack import running_stack

START_SECONDS: Final = 240.0
WAIT_SECONDS: Final = 90.0
LONG_REQUESTS: Final = 60_000  # three quarters of an hour on an idle machine: it must not end
# Small shards and quick rounds, so that what pages show changes every few seconds.
ENVIRONMENT: Final = {
    "TILLER_SHARD_REQUESTS_MAX": "16",
    "TILLER_RECONCILE_SECONDS": "1",
    "TILLER_HEARTBEAT_SECONDS": "1",
}
WORDS: Final = ("w10 w20 w30 w40", "w11 w21 w31", "w12 w22 w32 w42 w52", "w13 w23 w33")
SENTENCES: Final = (
    "The weather on the coast was",
    "I think that this film is",
    "When she opened the letter, she",
    "The best thing about the city is",
)
LONG_NAME: Final = (
    "An account with a very long name that somebody typed without thinking of narrow screens"
)


class Desk:
    """The dashboard as a plain HTTP client uses it: to set things up, and to look behind pages."""

    def __init__(self, base: str, key: str) -> None:
        """Log in with an admin key."""
        self.http = httpx.Client(
            base_url=base, headers={"sec-fetch-site": "same-origin"}, trust_env=False, timeout=60
        )
        self.post("/admin/login", key=key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def post(self, path: str, **fields: str | list[str]) -> httpx.Response:
        """Send a form and see that it was taken."""
        answer = self.http.post(path, data={"form_token": str(uuid4()), **fields})
        assert answer.status_code in {200, 303}, answer.text
        return answer

    def page(self, path: str) -> str:
        """Load a page."""
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text

    def make_account(self, name: str) -> str:
        """Create an account; give its public id."""
        where = self.post("/admin/accounts", name=name).headers["location"]
        return _found(r"acct_[0-9a-f]{32}", where)

    def make_key(self, account: str, name: str, *scopes: str, role: str = "read-only") -> str:
        """Create a key; give its secret."""
        page = self.post(
            f"/admin/accounts/{account}/keys", name=name, scopes=list(scopes), role=role
        ).text
        return _found(r"sk_live_[0-9a-f]{72}", page)

    def session(self) -> StorageState:
        """Give the session as a browser keeps it."""
        token = self.http.cookies[COOKIE]
        return {
            "cookies": [
                {
                    "name": COOKIE,
                    "value": token,
                    "domain": "127.0.0.1",
                    "path": "/admin",
                    "expires": -1,
                    "httpOnly": True,
                    "secure": False,
                    "sameSite": "Strict",
                }
            ],
            "origins": [],
        }


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The service: where it is, who may enter, and the public ids of what is to be seen."""

    base: str
    credentials: Mapping[str, Any]
    client: Client
    desk: Desk
    keys: Mapping[str, str]
    sessions: Mapping[str, StorageState]
    jobs: Mapping[str, str]
    accounts: Mapping[str, str]
    model: str
    prompts: Sequence[str]

    def path(self, template: str) -> str:
        """Fill the ids of Jobs and accounts into a path."""
        return template.format(**self.jobs, **self.accounts)

    def submit(self, name: str | None, *, requests: int = 40) -> str:
        """Submit a Job that waits its turn behind the long one; give its id."""
        work = [{"prompt": self.prompts[k % 4], "max_tokens": 100} for k in range(requests)]
        fields = {"name": name} if name else {}
        return str(self.client.create_job(model=self.model, requests=work, **fields)["id"])


def wait_for(found: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.1)


@contextmanager
def served(data: Path, model: Path | None = None) -> Iterator[Scene]:
    """Run a service in the new folder `data` and set the scene.

    It serves the model in the folder `model`, which reads English; without one, a tiny random one.
    """
    prompts = WORDS if model is None else SENTENCES
    model = model or make_tiny_llama(data / "models" / "tiny-llama")
    data.mkdir(parents=True, exist_ok=True)
    # Few requests at once and one thread: the long Job must not take the machine from the pages.
    (data / "models.toml").write_text(
        f'[models.{model.name}]\npath = "{model}"\nmax_num_seqs = 4\nthreads = 1\n'
        f"kv_cache_bytes = {256 * 1024**2}\n",
        encoding="utf-8",
    )
    with ExitStack() as stack:
        with mock.patch.dict(os.environ, ENVIRONMENT):
            credentials = stack.enter_context(running_stack(data, ready_seconds=START_SECONDS))
        base = str(credentials["api_base"]).removesuffix("/v1")
        client = stack.enter_context(Client(credentials["api_base"], credentials["api_key"]))
        desk = stack.enter_context(Desk(base, credentials["admin_key"]))
        yield _set_scene(base, credentials, client=client, desk=desk, prompts=prompts)


def _set_scene(
    base: str,
    credentials: Mapping[str, Any],
    *,
    client: Client,
    desk: Desk,
    prompts: Sequence[str],
) -> Scene:
    accounts = {
        "local": _found(r"acct_[0-9a-f]{32}", desk.page("/admin/accounts")),
        "lab": desk.make_account("Interpretability lab"),
        "stopped": desk.make_account(LONG_NAME),
    }
    lab, stopped = accounts["lab"], accounts["stopped"]
    desk.post(f"/admin/accounts/{lab}/tokens", kind="grant", amount="2500000", note="a year")
    desk.post(f"/admin/accounts/{stopped}/tokens", kind="grant", amount="1000", note="a trial")
    desk.post(f"/admin/accounts/{stopped}/holds/stop", reason="The owner left the institute.")
    keys: dict[str, str] = {
        role: desk.make_key(lab, f"{role} of the lab", "admin", role=role)
        for role in ROLES
        if role != "admin"
    }
    keys["admin"] = credentials["admin_key"]
    sessions: dict[str, StorageState] = {}
    for role, key in keys.items():
        with Desk(base, key) as own:
            sessions[role] = own.session()
    user = desk.make_key(lab, "notebook", "jobs:read", "jobs:write", "completions")
    model = client.models()[0]
    jobs = _submit(client, model, prompts)
    with Client(credentials["api_base"], user) as other:
        work = [{"prompt": prompt, "max_tokens": 30} for prompt in prompts] * 30
        jobs["nameless"] = other.create_job(model=model["id"], requests=work)["id"]
    return Scene(
        base=base,
        credentials=credentials,
        client=client,
        desk=desk,
        keys=keys,
        sessions=sessions,
        jobs=jobs,
        accounts=accounts,
        model=str(model["id"]),
        prompts=prompts,
    )


def _submit(client: Client, model: Mapping[str, Any], prompts: Sequence[str]) -> dict[str, str]:
    """Submit every kind of Job; those that end have ended, the long one has begun."""
    width = int(model["capabilities"]["hidden_size"])

    def submit(name: str, requests: list[dict[str, Any]], **fields: Any) -> str:
        job = client.create_job(model=model["id"], name=name, requests=requests, **fields)
        return str(job["id"])

    def steer(scale: float, number: float = 1.0) -> dict[str, Any]:
        return {"activations": [[number] * width], "layer_indices": [2], "scale": scale}

    pairs = [
        {"prompt": prompt, "seed": 7, "max_tokens": 40, "custom_id": f"prompt-{place}-at-{scale}"}
        | {"apply_steering_vectors": [steer(scale)]}
        for place, prompt in enumerate(prompts)
        for scale in (0, 4, -4)
    ]
    # Each of the two is finite; their sum is not.
    beyond = {"apply_steering_vectors": [steer(1.0, 3e38)] * 2}
    mixed = [
        {"prompt": prompts[k % 4], "max_tokens": 8, "custom_id": f"try-{k}"}
        | (beyond if k % 10 == 3 else {})
        for k in range(40)
    ]
    read = [
        {"prompt": prompts[k % 4], "max_tokens": 12, "output_residual_stream": [0, 1, 2, 3]}
        for k in range(24)
    ]
    about = {"study": "sentiment", "direction": "happy minus sad"}
    jobs = {
        "pairs": submit("Sentiment sweep at Layer 2", pairs, metadata=about),
        "errors": submit("Strengths beyond the range", mixed),
        "captures": submit("Residual stream of every Layer", read),
    }
    for name in list(jobs):
        wait_for(partial(_is_over, client, jobs[name]), f"the Job {name}")
    work = [{"prompt": prompts[k % 4], "max_tokens": 100} for k in range(400)]
    defaults = {"ignore_eos": True}
    jobs["cancelled"] = submit("Started by mistake", work, defaults=defaults)
    wait_for(lambda: _ended(client, jobs["cancelled"]) > 0, "its first requests")
    client.cancel_job(jobs["cancelled"])
    work = [{"prompt": prompts[k % 4], "max_tokens": 100} for k in range(LONG_REQUESTS)]
    jobs["running"] = submit("Long sweep over strengths", work, defaults=defaults)
    wait_for(lambda: _ended(client, jobs["running"]) > 0, "the long Job's first requests")
    return jobs


def _is_over(client: Client, job: str) -> bool:
    return client.get_job(job, wait=5)["finished_at"] is not None


def _ended(client: Client, job: str) -> int:
    return int(client.get_job(job)["request_counts"]["succeeded"])


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in {text[:2000]}"
    return match[0]
