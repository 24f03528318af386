"""The live stream, over a real socket: what changes is sent, and it ends when it should."""

import re
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice

import httpx
import pytest
import uvicorn

from app.admin import (
    accounts,
    audit_pages,
    job,
    jobs,
    live,
    models,
    overview,
    requests,
    system,
    workers,
)
from app.admin.live import FOLLOWED
from app.jobs.audit_runs import note_run, started_at
from app.jobs.records import Job, WorkerIdentity
from app.kit.ids import public_id
from app.ledger.holds import grant_tokens
from app.main import create_app
from tests.admin.pages.running import end_cancelled, wait_until
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders

PIECES = {
    "overview": overview.PIECES,
    "jobs": jobs.PIECES,
    "job": job.PIECES,
    "requests": requests.PIECES,
    "workers": workers.PIECES,
    "models": models.PIECES,
    "accounts": accounts.LIST_PIECES,
    "account": accounts.PIECES,
    "ledger": accounts.LEDGER_PIECES,
    "audit": audit_pages.PIECES,
    "system": system.PIECES,
}
OVERVIEW = "/admin/live?page=overview"
SAME_ORIGIN = {"sec-fetch-site": "same-origin"}


@pytest.fixture(scope="module")
def address(running_dashboard: Dashboard) -> Iterator[str]:
    """The same dashboard behind a server of its own, with room for eight streams."""
    settings = running_dashboard.app.state.settings.model_copy(update={"admin_live_streams": 8})
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


def events(answer: httpx.Response) -> Generator[tuple[str, str]]:
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
        client.stream("GET", f"/admin/live?page=job&job={name}") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        stream = events(answer)
        assert "queued" in next_event(stream, "state")
        assert client.post(f"/admin/jobs/{name}/cancel").status_code == 303
        # How long it has waited changes at each look, so an older text may come first.
        assert any("cancelling" in data for name, data in stream if name == "state")
        end_cancelled(dashboard, job.id)
        assert [name for name, _ in stream][-2:] == ["over", "end"]


def test_a_list_of_jobs_is_followed_with_its_filters(dashboard: Dashboard, address, quick):
    here = Builders(dashboard.database)
    names = ("other", "a wanted sweep")
    with (
        person(dashboard, address) as client,
        client.stream("GET", "/admin/live?page=jobs&q=wanted&status=unfinished") as answer,
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
        answer = client.get("/admin/live?page=jobs&status=nope")
        assert answer.status_code == 400
        assert "status must be" in answer.text


def test_only_what_changed_is_sent(dashboard: Dashboard, address, quick):
    with person(dashboard, address) as client, client.stream("GET", OVERVIEW) as answer:
        stream = events(answer)
        first = {next(stream)[0] for _ in range(7)}
        assert first == {"attention", "tiles", "charts", "queues", "live-jobs", "errors", "crew"}
        Builders(dashboard.database).a_worker()
        # The charts, too, when a new minute begins.
        changed = set(islice((name for name, _ in stream if name != "charts"), 3))
        assert changed <= {"tiles", "queues", "crew", "attention"}
        client.post("/admin/logout")
        assert next_event(stream, "end") == "logged out"


def test_every_page_that_lies_in_the_menu_or_below_is_followed():
    assert set(FOLLOWED) == set(PIECES)


# Not the overview nor a Job that waits: how long it has waited changes at each look.
@pytest.mark.parametrize("page", sorted(set(PIECES) - {"overview", "job"}))
def test_every_page_is_followed_until_the_session_ends(
    dashboard: Dashboard, address, quick, monkeypatch, page
):
    monkeypatch.setattr(live, "QUIET_SECONDS", 0.3)
    scene = Scene.of(dashboard)
    followed, act, changed = scene.pages()[page]
    with (
        person(dashboard, address) as client,
        client.stream("GET", f"/admin/live?page={page}{followed}") as answer,
    ):
        lines = answer.iter_lines()
        # Each piece once, and then nothing: what did not change is not sent again.
        # (A heartbeat's age is text: of workers it comes again each second.)
        sent = until_quiet(lines)
        assert set(sent) == set(PIECES[page])
        assert page == "workers" or len(sent) == len(PIECES[page])
        act()
        if page == "system":  # read anew at the latest when its sizes are ten seconds old
            assert "invariants" in until_event(lines, "invariants")
        else:
            seen: set[str] = set()
            while not changed <= seen:  # it may have said before the act that it is still there
                seen |= set(until_quiet(lines))
            assert seen == changed
        client.post("/admin/logout")
        assert until_event(lines, "end")[-1] == "end"
        assert until_quiet(lines) == []


def until_quiet(lines: Iterator[str]) -> list[str]:
    """List the events that come before the stream says that it is still there, or ends."""
    names: list[str] = []
    for line in lines:
        if line.startswith(": still here"):
            break
        if line.startswith("event: "):
            names.append(line.removeprefix("event: "))
    return names


def until_event(lines: Iterator[str], wanted: str) -> list[str]:
    """List the events that come, up to one of this name."""
    names: list[str] = []
    for line in lines:
        if line.startswith("event: "):
            names.append(line.removeprefix("event: "))
        if not line and names and names[-1] == wanted:
            return names
    pytest.fail(f"the stream ended without {wanted}, after {names}")


@dataclass
class Scene:
    """A Job that waits, its account and a worker, and what can happen to each."""

    dashboard: Dashboard
    builders: Builders
    job: Job
    worker: WorkerIdentity

    @classmethod
    def of(cls, dashboard: Dashboard) -> "Scene":
        builders = Builders(dashboard.database)
        return cls(dashboard, builders, builders.a_job(requests=5), builders.a_worker())

    def pages(self) -> dict[str, tuple[str, Callable[[], object], set[str]]]:
        """Say of each page what its address says, what happens, and which pieces it changes."""
        job = f"&job={public_id('job', self.job.id)}"
        account = f"&account={public_id('acct', self.job.account_id)}"
        return {
            "jobs": ("", self.builders.a_job, {"jobs"}),
            "requests": (job, self.lease, {"counts", "requests"}),
            "workers": ("", self.lease, {"workers"}),
            "models": ("", self.lease, {"models"}),
            "accounts": ("", lambda: self.builders.an_account(name="new"), {"accounts"}),
            "account": (account, self.grant, {"tokens", "entries"}),
            "ledger": (account, self.grant, {"ledger"}),
            "audit": ("&action=holds.stop", self.stop, {"acts"}),
            "system": ("", self.check, {"invariants"}),
        }

    def lease(self) -> None:
        self.builders.a_lease(self.worker)

    def grant(self) -> None:
        with self.dashboard.database.transaction() as conn:
            grant_tokens(conn, self.job.account_id, 7, "seven more")

    def stop(self) -> None:
        account = public_id("acct", self.job.account_id)
        browser = self.dashboard.browser("operator")
        answer = browser.post(f"/admin/accounts/{account}/holds/stop", reason="because")
        assert answer.status_code == 303

    def check(self) -> None:
        with self.dashboard.database.transaction() as conn:
            note_run(conn, started_at(conn), [], run_by="somebody")


@pytest.mark.parametrize(
    ("path", "still"),
    [
        ("/admin/jobs", False),
        (f"/admin/jobs?after=2026-01-01T00:00:00%2B00:00~{'0' * 32}", True),
        ("/admin/jobs/{job}/requests?status=pending", False),
        ("/admin/jobs/{job}/requests?after=2", True),
        ("/admin/accounts", False),
        ("/admin/accounts?name=an", True),
        ("/admin/accounts?holds=stopped", True),
        (f"/admin/accounts?after=acct_{'f' * 32}", True),
        ("/admin/accounts/{account}/ledger?kind=grants", False),
        ("/admin/accounts/{account}/ledger?before=1", True),
        ("/admin/audit?action=login", False),
        ("/admin/audit?before=1", True),
    ],
)
def test_a_page_that_stands_still_says_so_and_where_it_moves(
    dashboard: Dashboard, path: str, *, still: bool
):
    job = Builders(dashboard.database).a_job(requests=5)
    browser = dashboard.browser("read-only")
    names = {"job": public_id("job", job.id), "account": public_id("acct", job.account_id)}
    text = browser.get(path.format(**names)).text
    assert ("This page stands still" in text) is still
    assert ("sse-connect=" in text) is not still
    assert ("data-live=" in text) is not still
    if still:
        where = re.search(r'stands still; <a href="([^"]+)">[a-z ]+ is live</a>', text)
        assert where is not None
        assert "sse-connect=" in browser.get(where[1].replace("&amp;", "&")).text


def test_the_requests_of_a_job_that_is_over_are_not_followed(dashboard: Dashboard):
    made = Builders(dashboard.database).a_job(requests=5)
    name = public_id("job", made.id)
    browser = dashboard.browser("operator")
    assert browser.post(f"/admin/jobs/{name}/cancel").status_code == 303
    end_cancelled(dashboard, made.id)
    for path in (f"/admin/jobs/{name}", f"/admin/jobs/{name}/requests?after=2"):
        text = browser.get(path).text
        assert "sse-connect=" not in text
        assert "stands still" not in text


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "?page=login",
        f"?page=account&account=acct_{'0' * 32}",
        "?page=account&account=me",
        f"?page=ledger&account=acct_{'0' * 32}",
        f"?page=requests&job=job_{'0' * 32}",
        "?page=job",
    ],
)
def test_what_does_not_exist_is_not_followed(dashboard: Dashboard, asked):
    assert dashboard.browser("read-only").get(f"/admin/live{asked}").status_code == 404


def test_a_heartbeat_does_not_grow_old_on_a_page_that_is_not_renewed(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    builders.a_worker()
    browser = dashboard.browser("read-only")
    cell = re.compile(r'data-label="Heartbeat">(.*?)</td>')
    healthy = cell.findall(browser.get("/admin/workers").text)
    assert "data-relative" not in healthy[0]
    assert "title=" in healthy[0]
    with dashboard.database.transaction() as conn:
        conn.execute("UPDATE workers SET heartbeat_at = now() - interval '40 seconds'")
    silent = cell.findall(browser.get("/admin/workers").text)
    assert re.search(r"data-relative>4\d s ago", silent[0])


def test_a_worker_that_is_gone_shows_how_its_last_check_of_steering_came_out(
    dashboard: Dashboard,
):
    Builders(dashboard.database).a_worker()
    with dashboard.database.transaction() as conn:
        conn.execute(
            "UPDATE workers SET state = 'gone', canary = 'Layer 2 differs', last_canary_at = now()"
        )
    text = dashboard.browser("read-only").get("/admin/workers").text
    gone = text[text.index("Gone within the last hour") :]
    assert "failed</span>" in gone
    assert "Layer 2 differs" in gone


def test_a_quiet_stream_says_that_it_is_still_there(
    dashboard: Dashboard, address, quick, monkeypatch
):
    monkeypatch.setattr(live, "QUIET_SECONDS", 0.1)
    with person(dashboard, address) as client, client.stream("GET", OVERVIEW) as answer:
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
    with person(dashboard, address) as client, client.stream("GET", OVERVIEW) as answer:
        for piece in answer.iter_text():
            text += piece
            if "event: crew\n" in text:  # the last piece of the page
                break
    assert "data: data: bye\n" in text
    assert "\r" not in text
    names = re.findall(r"^event: (.*)$", text, re.MULTILINE)
    assert set(names) == set(PIECES["overview"])


def test_one_session_has_a_share_of_the_streams_and_leaves_room_for_others(
    dashboard: Dashboard, address, quick
):
    with ExitStack() as stack:
        greedy, other = (stack.enter_context(person(dashboard, address)) for _ in range(2))
        for _ in range(2):
            follow(stack, greedy)
        assert not has_room(greedy)
        assert has_room(other)


def test_streams_are_bounded_and_one_too_many_gets_no_content(dashboard: Dashboard, address, quick):
    with ExitStack() as stack:
        people = [stack.enter_context(person(dashboard, address)) for _ in range(5)]
        with ExitStack() as streams:
            for client in people[:4]:
                for _ in range(2):
                    follow(streams, client)
            assert not has_room(people[4])
        # Whoever hangs up makes room.
        wait_until(lambda: has_room(people[4]), "room for a stream")


def follow(stack: ExitStack, client: httpx.Client) -> None:
    """Open a stream that stays, as soon as there is room for it."""

    def is_followed() -> bool:
        answer = stack.enter_context(client.stream("GET", OVERVIEW))
        stream = events(answer)
        stack.callback(stream.close)  # kept until then: without it the stream would be left
        return any(name == "tiles" for name, _ in stream)

    wait_until(is_followed, "room for a stream")


def test_streams_that_come_at_once_do_not_pass_the_bound(dashboard: Dashboard, address, quick):
    ready, over, served = threading.Barrier(6), threading.Event(), []

    def follow(client: httpx.Client) -> None:
        ready.wait(10)
        with client.stream("GET", OVERVIEW) as answer:
            lines = answer.iter_lines()  # kept: without it the stream would be left
            served.append(any(line == "event: tiles" for line in lines))
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
    with client.stream("GET", OVERVIEW) as answer:
        return answer.status_code == 200


def test_without_a_session_a_stream_says_so_and_is_over(dashboard: Dashboard, address):
    headers = {**SAME_ORIGIN, "accept": "text/event-stream"}
    answer = httpx.get(f"{address}{OVERVIEW}", headers=headers, trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == "event: end\ndata: logged out\n\n"
