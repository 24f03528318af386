"""The live stream: pieces of the overview, of the list of Jobs or of a Job's page, as they change.

A stream holds no thread and no connection between two looks. Streams of one page share what was
read; there is a bound on how many streams there are. A stream ends with the session, and with its
Job.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from app.admin import job as job_page
from app.admin import jobs as jobs_page
from app.admin import overview as overview_page
from app.admin.access import Operator, OperatorDep
from app.admin.job_view_reads import JobPageView, read_job_page
from app.admin.overview_reads import read_overview
from app.admin.pages import fragment
from app.kit.db import RETRIED, Conn, Database, DatabaseUnavailableError
from app.kit.deps import DatabaseDep, SettingsDep
from app.settings import Settings

router = APIRouter()

LOOK_SECONDS: Final = 2.0
SHARED_SECONDS: Final = 1.5
THREADS_MAX: Final = 4  # with Postgres away, streams must not take the threads of pages
QUIET_SECONDS: Final = 15.0  # then a comment, so that nothing between here and there hangs up
RETRY_MILLIS: Final = 5000
# What changes by the passing of time alone: relative times, which the page renews itself.
_CLOCK_TEXT = re.compile(r"(data-relative>)[^<]*")
_LINE_END = re.compile(r"\r\n|\r|\n")  # all three end a line of an event stream

Read = Callable[[Conn], dict[str, Any] | None]
T = TypeVar("T")


@dataclass(slots=True)
class Streams:
    """What the streams of one process share; used on the event loop only."""

    count: int = 0
    threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(THREADS_MAX))
    looks: dict[str, tuple[float, "asyncio.Task[dict[str, Any] | None]"]] = field(
        default_factory=dict
    )

    async def call(self, work: Callable[[], T]) -> T:
        """Do `work` in one of the few threads that streams have together."""
        return await to_thread.run_sync(work, limiter=self.threads)

    async def look(self, key: str, work: Callable[[], dict[str, Any] | None]) -> Any:
        """Do `work` in a thread, or give what another stream has just read under `key`."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.looks = {
            name: item for name, item in self.looks.items() if item[0] > now or not item[1].done()
        }
        if key not in self.looks:
            task = asyncio.create_task(self.call(work))
            self.looks[key] = (now + SHARED_SECONDS, task)
        return await asyncio.shield(self.looks[key][1])


@dataclass(frozen=True, slots=True)
class Page:
    """A page that is followed: how it is read, its pieces, when there is nothing more to come."""

    key: str
    read: Read
    pieces: dict[str, str]
    is_over: Callable[[dict[str, Any]], bool]


@router.get("/live")
async def live(
    request: Request, operator: OperatorDep, database: DatabaseDep, settings: SettingsDep
) -> Response:
    """Follow the overview, the Job that `job` names, or with `list` the Jobs that match."""
    name = request.query_params.get("job")
    if name is not None:
        page = _job(job_page.job_id_of(name))
    else:
        page = _jobs(request) if "list" in request.query_params else _overview()
    streams = _streams(request)
    if streams.count >= settings.admin_live_streams:
        # The page stays as it was loaded, and asks again at growing intervals of up to 64 s.
        return Response(status_code=204)
    first = await streams.look(page.key, lambda: database.run(page.read))
    if first is None:
        raise job_page.missing_job(name or "")
    return StreamingResponse(
        _events(request, page, operator, settings),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def _events(
    request: Request, page: Page, operator: Operator, settings: Settings
) -> AsyncIterator[str]:
    """Send every piece once, then those that change; a comment when nothing does for long."""
    streams, database = _streams(request), request.app.state.database
    # Counted in the step that checks: streams that were let in together must not pass the bound.
    if streams.count >= settings.admin_live_streams:
        return
    streams.count += 1
    idle_seconds = settings.admin_idle_seconds
    loop = asyncio.get_running_loop()
    sent: dict[str, str] = {}
    try:
        yield f"retry: {RETRY_MILLIS}\n\n"
        spoken_at = loop.time()
        while not await request.is_disconnected():
            try:
                is_open = await streams.call(lambda: _is_open(database, operator, idle_seconds))
                if not is_open:
                    yield _event("end", "logged out")
                    return
                seen = await streams.look(page.key, lambda: database.run(page.read))
            except (*RETRIED, DatabaseUnavailableError):
                seen = {}  # Postgres is away: the page keeps what it has, and the stream waits
            if seen is None:
                yield _event("end", "gone")
                return
            pieces = await streams.call(partial(_render, request, page, seen))
            for name, text in pieces.items():
                known = _CLOCK_TEXT.sub(r"\1", text)
                if sent.get(name) != known:
                    sent[name] = known
                    spoken_at = loop.time()
                    yield _event(name, text)
            if seen and page.is_over(seen):
                yield _event("end", "over")
                return
            if loop.time() - spoken_at > QUIET_SECONDS:
                spoken_at = loop.time()
                yield ": still here\n\n"
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        streams.count -= 1


def _render(request: Request, page: Page, seen: dict[str, Any]) -> dict[str, str]:
    if not seen:
        return {}
    return {name: fragment(request, file, **seen) for name, file in page.pieces.items()}


def _event(name: str, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in _LINE_END.split(text))
    return f"event: {name}\n{lines}\n"


def _overview() -> Page:
    return Page(
        "overview",
        lambda conn: overview_page.overview_context(read_overview(conn)),
        overview_page.PIECES,
        lambda _seen: False,
    )


def _jobs(request: Request) -> Page:
    name, read = jobs_page.followed_list(request)
    return Page(f"jobs {name}", read, jobs_page.PIECES, lambda _seen: False)


def _job(job_id: UUID) -> Page:
    def read(conn: Conn) -> dict[str, Any] | None:
        page = read_job_page(conn, job_id)
        return None if page is None else job_page.job_context(page)

    def is_over(seen: dict[str, Any]) -> bool:
        page: JobPageView = seen["page"]
        return page.job.state.is_terminal

    return Page(f"job {job_id.hex}", read, job_page.PIECES, is_over)


def _streams(request: Request) -> Streams:
    state = request.app.state
    if not hasattr(state, "admin_streams"):
        state.admin_streams = Streams()
    streams: Streams = state.admin_streams
    return streams


def _is_open(database: Database, operator: Operator, idle_seconds: float) -> bool:
    """Look whether a session is still open, without noting that it was seen."""
    with database.transaction() as conn:
        row = conn.execute(
            """
            SELECT 1 FROM admin_sessions JOIN api_keys ON api_keys.id = key_id
            WHERE admin_sessions.id = %s AND ended_at IS NULL
                AND admin_sessions.expires_at > now()
                AND last_seen_at > now() - make_interval(secs => %s)
                AND role = %s AND revoked_at IS NULL
                AND (api_keys.expires_at IS NULL OR api_keys.expires_at > now())
            """,
            [operator.session_id, idle_seconds, operator.role],
        ).fetchone()
    return row is not None
