"""The whole API with its dashboard behind a real server on loopback, and a record of its answers.

What a browser sent and what it was told is written down at the server: an answer that a page may
not read, or that the browser hides, is seen here all the same.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.accounts.accounts import create_account, create_key
from app.kit.db import Database
from app.main import create_app
from app.settings import Settings
from tests.admin.people import SAME_ORIGIN
from tests.fixtures.api import PEPPER, settings_for

WAIT_SECONDS = 60.0
CONTEXT_TOKENS = 4096  # of the tiny model, so that prompts may be long


@dataclass(frozen=True)
class Answer:
    """One answer, with what the browser told of the page that asked."""

    method: str
    path: str
    status: int
    site: str | None
    mode: str | None
    dest: str | None
    origin: str | None
    has_cookie: bool


@dataclass
class Recorder:
    """Pure ASGI around the application: keeps every answer once its headers are out."""

    app: ASGIApp
    answers: list[Answer] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = {name.decode(): value.decode() for name, value in scope["headers"]}
                self.answers.append(
                    Answer(
                        scope["method"],
                        scope["path"],
                        message["status"],
                        headers.get("sec-fetch-site"),
                        headers.get("sec-fetch-mode"),
                        headers.get("sec-fetch-dest"),
                        headers.get("origin"),
                        "tiller_session=" in headers.get("cookie", ""),
                    )
                )
            await send(message)

        await self.app(scope, receive, sending if scope["type"] == "http" else send)


@dataclass(frozen=True)
class Premises:
    """A dashboard that can be visited: its address, its database, its application."""

    base: str
    database: Database
    app: FastAPI
    recorder: Recorder

    @property
    def settings(self) -> Settings:
        """What the application was started with."""
        settings: Settings = self.app.state.settings
        return settings

    def admin_key(self, name: str) -> str:
        """Make an account of that name with a key of the role admin."""
        with self.database.transaction() as conn:
            account = create_account(conn, name)
            made = create_key(conn, account, PEPPER, name=name, scopes={"admin"}, role="admin")
        return made.secret

    def client(self, **headers: str) -> httpx.Client:
        """Open a client that sends what a page of the dashboard sends."""
        sent = {**SAME_ORIGIN, **headers}
        return httpx.Client(
            base_url=self.base, headers=sent, trust_env=False, verify=False, timeout=30
        )

    def log_in(self, client: httpx.Client, key: str) -> str:
        """Log a client in; give the token of its session."""
        answer = client.post("/admin/login", data={"key": key})
        assert answer.status_code == 303, answer.text
        return str(answer.cookies["tiller_session"])


@contextmanager
def premises(folder: Path, database_url: str, redis_url: str) -> Iterator[Premises]:
    """Serve the API on a port of its own until the block ends."""
    settings = settings_for(folder, database_url=database_url, redis_url=redis_url)
    config = folder / "tiny" / "config.json"
    text = config.read_text()
    context = '"max_position_embeddings": '
    assert f"{context}64" in text
    config.write_text(text.replace(f"{context}64", f"{context}{CONTEXT_TOKENS}"))
    app = create_app(settings)
    recorder = Recorder(app)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(recorder, log_config=None, timeout_graceful_shutdown=1, ws="none")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        database = Database(database_url, size_max=4)
        try:
            until(lambda: server.started or not thread.is_alive(), "the server")
            assert server.started
            base = f"http://127.0.0.1:{listening.getsockname()[1]}"
            yield Premises(base, database, app, recorder)
        finally:
            server.should_exit = True
            thread.join()
            database.close()


def until(true: Callable[[], object], what: str, pause: Callable[[], object] | None = None) -> None:
    """Wait for a condition; `pause` passes a moment (a page's own, where one must go on)."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, f"waited for {what}"
        if pause is None:
            time.sleep(0.02)
        else:
            pause()
