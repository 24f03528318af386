"""The live stream, over a real socket: what changes is sent, and it ends when it should."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from app.admin import live
from app.admin.overview import PIECES
from app.kit.ids import public_id
from app.main import create_app
from tests.admin.pages.running import wait_until
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders

SAME_ORIGIN = {"sec-fetch-site": "same-origin"}


@pytest.fixture(scope="module")
def address(running_dashboard: Dashboard) -> Iterator[str]:
    """The same dashboard behind a server of its own, with room for two streams."""
    settings = running_dashboard.app.state.settings.model_copy(update={"admin_live_streams": 2})
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            create_app(settings), log_config=None, timeout_graceful_shutdown=1, ws="none"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        wait_until(lambda: server.started, "the server")
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(live, "SHARED_SECONDS", 0.01)


@contextmanager
def person(dashboard: Dashboard, address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, headers=SAME_ORIGIN, trust_env=False, timeout=20) as client:
        answer = client.post("/admin/login", data={"key": dashboard.keys["operator"]})
        assert answer.status_code == 303
        yield client


def events(answer: httpx.Response) -> Iterator[tuple[str, str]]:
    name, data = "", []
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data.append(line.removeprefix("data: "))
        elif not line and name:
            yield name, "\n".join(data)
            name, data = "", []


def next_event(stream: Iterator[tuple[str, str]], wanted: str) -> str:
    for name, data in stream:
        if name == wanted:
            return data
    pytest.fail(f"the stream ended without {wanted}")


def test_a_job_is_followed_until_it_is_over(dashboard: Dashboard, address, quick):
    job = Builders(dashboard.database).a_job(requests=5)
    name = public_id("job", job.id)
    with (
        person(dashboard, address) as client,
        client.stream("GET", f"/admin/live?job={name}") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        stream = events(answer)
        assert "queued" in next_event(stream, "state")
        assert client.post(f"/admin/jobs/{name}/cancel").status_code == 303
        assert "cancelling" in next_event(stream, "state")
        with dashboard.database.transaction() as conn:
            conn.execute(
                """
                UPDATE jobs SET state = 'cancelled', ended_running_at = now(), finished_at = now()
                WHERE id = %s
                """,
                [job.id],
            )
        assert next_event(stream, "end") == "over"


def test_a_list_of_jobs_is_followed_with_its_filters(dashboard: Dashboard, address, quick):
    here = Builders(dashboard.database)
    names = ("other", "a wanted sweep")
    with (
        person(dashboard, address) as client,
        client.stream("GET", "/admin/live?list=jobs&q=wanted&status=unfinished") as answer,
    ):
        stream = events(answer)
        assert "No Job matches" in next_event(stream, "jobs")
        for name in names:
            job = here.a_job()
            with dashboard.database.transaction() as conn:
                conn.execute("UPDATE jobs SET name = %s WHERE id = %s", [name, job.id])
        found = next_event(stream, "jobs")
        assert names[1] in found
        assert names[0] not in found


def test_a_list_that_cannot_be_read_is_not_followed(dashboard: Dashboard, address):
    with person(dashboard, address) as client:
        answer = client.get("/admin/live?list=jobs&status=nope")
        assert answer.status_code == 400
        assert "status must be" in answer.text


def test_only_what_changed_is_sent(dashboard: Dashboard, address, quick):
    with person(dashboard, address) as client, client.stream("GET", "/admin/live") as answer:
        stream = events(answer)
        first = {next(stream)[0] for _ in range(7)}
        assert first == {"attention", "tiles", "charts", "queues", "live-jobs", "errors", "crew"}
        Builders(dashboard.database).a_worker()
        changed = {next(stream)[0] for _ in range(3)}
        assert changed <= {"tiles", "queues", "crew", "attention"}


def test_a_stream_ends_with_its_session(dashboard: Dashboard, address, quick):
    with person(dashboard, address) as client, client.stream("GET", "/admin/live") as answer:
        stream = events(answer)
        next_event(stream, "tiles")
        client.post("/admin/logout")
        assert next_event(stream, "end") == "logged out"


def test_a_quiet_stream_says_that_it_is_still_there(
    dashboard: Dashboard, address, quick, monkeypatch
):
    monkeypatch.setattr(live, "QUIET_SECONDS", 0.1)
    with person(dashboard, address) as client, client.stream("GET", "/admin/live") as answer:
        assert ": still here" in answer.iter_lines()


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"], ids=repr)
def test_no_line_end_in_a_name_adds_an_event_to_the_stream(
    dashboard: Dashboard, address, quick, end
):
    job = Builders(dashboard.database).a_job()
    name = f"x{end}{end}event: end{end}data: bye{end}{end}"
    with dashboard.database.transaction() as conn:
        conn.execute("UPDATE jobs SET name = %s WHERE id = %s", [name, job.id])
    text = ""
    with person(dashboard, address) as client, client.stream("GET", "/admin/live") as answer:
        for piece in answer.iter_text():
            text += piece
            if "event: crew\n" in text:  # the last piece of the page
                break
    assert "data: data: bye\n" in text
    assert "\r" not in text
    names = re.findall(r"^event: (.*)$", text, re.MULTILINE)
    assert set(names) == set(PIECES)


def test_streams_are_bounded_and_one_too_many_gets_no_content(dashboard: Dashboard, address, quick):
    with person(dashboard, address) as client:
        with (
            client.stream("GET", "/admin/live") as one,
            client.stream("GET", "/admin/live") as two,
        ):
            open_streams = [events(one), events(two)]
            for stream in open_streams:
                next_event(stream, "tiles")
            assert not has_room(client)
        # Whoever hangs up makes room.
        wait_until(lambda: has_room(client), "room for a stream")


def test_streams_that_come_at_once_do_not_pass_the_bound(dashboard: Dashboard, address, quick):
    ready, over, served = threading.Barrier(6), threading.Event(), []

    def follow(client: httpx.Client) -> None:
        ready.wait(10)
        with client.stream("GET", "/admin/live") as answer:
            served.append(any(line == "event: tiles" for line in answer.iter_lines()))
            over.wait(20)

    with person(dashboard, address) as client:
        threads = [threading.Thread(target=follow, args=[client]) for _ in range(6)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: len(served) == 6, "an answer to each")
        finally:
            over.set()
            for thread in threads:
                thread.join(30)
    assert 1 <= sum(served) <= 2


def has_room(client: httpx.Client) -> bool:
    with client.stream("GET", "/admin/live") as answer:
        return answer.status_code == 200


def test_without_a_session_there_is_no_stream(dashboard: Dashboard, address):
    headers = {**SAME_ORIGIN, "accept": "text/event-stream"}
    answer = httpx.get(f"{address}/admin/live", headers=headers, trust_env=False)
    assert answer.status_code == 401
