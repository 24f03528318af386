"""The live stream: pieces of a page as they change, for every page that can be followed.

A stream holds no thread and no connection between two looks. Streams of one page share what was
read, but none begins with what is older than itself: a page that was loaded after an act must not
go back. There is a bound on how many streams there are, and on how many of them one session has. A
stream ends with the session, and with what it follows.
"""

import asyncio
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from app.admin import (
    accounts,
    audit_pages,
    job,
    jobs,
    models,
    overview,
    requests,
    system,
    workers,
)
from app.admin.access import Operator, OperatorDep
from app.admin.followed import Followed
from app.admin.pages import fragment
from app.errors import NotFoundError
from app.kit.db import RETRIED, Database, DatabaseUnavailableError
from app.kit.deps import DatabaseDep, SettingsDep
from app.settings import Settings

router = APIRouter()

LOOK_SECONDS: Final = 2.0
SHARED_SECONDS: Final = 1.5
THREADS_MAX: Final = 4  # with Postgres away, streams must not take the threads of pages
QUIET_SECONDS: Final = 15.0  # then a comment, so that nothing between here and there hangs up
RETRY_MILLIS: Final = 5000
SHARE_OF_SESSION: Final = 4  # one session has a quarter of all streams at most: others come in
HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}
MEDIA_TYPE: Final = "text/event-stream"
# What `page` may name, and which page that is.
FOLLOWED: Final[Mapping[str, Callable[[Request], Followed]]] = {
    "overview": overview.followed,
    "jobs": jobs.followed,
    "job": job.followed,
    "requests": requests.followed,
    "workers": workers.followed,
    "models": models.followed,
    "accounts": accounts.followed_list,
    "account": accounts.followed,
    "ledger": accounts.followed_ledger,
    "audit": audit_pages.followed,
    "system": system.followed,
}
# What changes by the passing of time alone: relative times, which the page renews itself.
_CLOCK_TEXT = re.compile(r"(data-relative>)[^<]*")
_LINE_END = re.compile(r"\r\n|\r|\n")  # all three end a line of an event stream

T = TypeVar("T")


@dataclass(slots=True)
class Look:
    """A read of a page that its streams share; times are those of the event loop."""

    good_until: float
    began: float = math.inf  # until a thread has begun it: it is new to whoever comes meanwhile
    task: "asyncio.Task[dict[str, Any] | None]" = field(init=False)


@dataclass(slots=True)
class Streams:
    """What the streams of one process share; used on the event loop only."""

    of_session: Counter[UUID] = field(default_factory=Counter)
    threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(THREADS_MAX))
    looks: dict[str, Look] = field(default_factory=dict)

    def has_room(self, session: UUID, streams_max: int) -> bool:
        """Tell whether this session may have one stream more."""
        share = -(-streams_max // SHARE_OF_SESSION)
        return self.of_session.total() < streams_max and self.of_session[session] < share

    def leave(self, session: UUID) -> None:
        """Note that a stream of this session has ended."""
        self.of_session[session] -= 1
        if self.of_session[session] == 0:
            del self.of_session[session]

    async def call(self, work: Callable[[], T]) -> T:
        """Do `work` in one of the few threads that streams have together."""
        return await to_thread.run_sync(work, limiter=self.threads)

    async def look(
        self, page: Followed, database: Database, *, not_before: float = 0.0
    ) -> dict[str, Any] | None:
        """Read a page in a thread, or give what another of its streams has just read.

        What was begun to be read before the moment `not_before` of the event loop is not given.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.looks = {
            name: look
            for name, look in self.looks.items()
            if look.good_until > now or not look.task.done()
        }
        look = self.looks.get(page.key)
        if look is None or look.began < not_before:
            look = Look(now + max(SHARED_SECONDS, page.fresh_seconds))
            look.task = asyncio.create_task(self.call(partial(_read, page, database, look, loop)))
            self.looks[page.key] = look
        return await asyncio.shield(look.task)


@router.get("/live")
async def live(
    request: Request, operator: OperatorDep, database: DatabaseDep, settings: SettingsDep
) -> Response:
    """Follow the page that `page` names; its other parameters are those of the page."""
    name = request.query_params.get("page", "")
    if name not in FOLLOWED:
        msg = f"There is no page {name[:80]!r} to follow; there are {', '.join(FOLLOWED)}."
        raise NotFoundError(msg)
    page = FOLLOWED[name](request)
    asked_at = asyncio.get_running_loop().time()
    streams = _streams(request)
    if not streams.has_room(operator.session_id, settings.admin_live_streams):
        # The page stays as it was loaded, and asks again at growing intervals of up to 64 s.
        return Response(status_code=204)
    first = await streams.look(page, database, not_before=asked_at)
    if first is None:
        raise page.missing()
    return StreamingResponse(
        _events(request, page, operator, settings, first), media_type=MEDIA_TYPE, headers=HEADERS
    )


def ended_stream(reason: str) -> Response:
    """Answer with a stream that is over: a page that follows it says why, and asks no more."""
    return Response(_event("end", reason), media_type=MEDIA_TYPE, headers=HEADERS)


async def _events(
    request: Request,
    page: Followed,
    operator: Operator,
    settings: Settings,
    first: dict[str, Any],
) -> AsyncIterator[str]:
    """Send every piece of `first`, then those that change; a comment when nothing does for long."""
    streams, database = _streams(request), request.app.state.database
    # Counted in the step that checks: streams that were let in together must not pass the bound.
    if not streams.has_room(operator.session_id, settings.admin_live_streams):
        return
    streams.of_session[operator.session_id] += 1
    idle_seconds = settings.admin_idle_seconds
    loop = asyncio.get_running_loop()
    sent: dict[str, str] = {}
    known: dict[str, Any] | None = None
    try:
        yield f"retry: {RETRY_MILLIS}\n\n"
        spoken_at = loop.time()
        while not await request.is_disconnected():
            try:
                is_open = await streams.call(lambda: _is_open(database, operator, idle_seconds))
                if not is_open:
                    yield _event("end", "logged out")
                    return
                seen = first if known is None else await streams.look(page, database)
            except (*RETRIED, DatabaseUnavailableError):
                seen = known  # Postgres is away: the page keeps what it has, and the stream waits
            else:
                if seen is None:
                    yield _event("end", "gone")
                    return
            if seen is not None and seen is not known:
                known = seen
                pieces = await streams.call(partial(_render, request, page, seen))
                for name, text in pieces.items():
                    timeless = _CLOCK_TEXT.sub(r"\1", text)
                    if sent.get(name) != timeless:
                        sent[name] = timeless
                        spoken_at = loop.time()
                        yield _event(name, text)
                if page.is_over(seen):
                    # Two events: pieces that wait for the end are not to be asked for by somebody
                    # who was logged out.
                    yield _event("over", "over") + _event("end", "over")
                    return
            if loop.time() - spoken_at > QUIET_SECONDS:
                spoken_at = loop.time()
                yield ": still here\n\n"
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        streams.leave(operator.session_id)


def _read(
    page: Followed, database: Database, look: Look, loop: asyncio.AbstractEventLoop
) -> dict[str, Any] | None:
    look.began = loop.time()
    return database.read(page.read)


def _render(request: Request, page: Followed, seen: dict[str, Any]) -> dict[str, str]:
    return {name: fragment(request, file, **seen) for name, file in page.pieces.items()}


def _event(name: str, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in _LINE_END.split(text))
    return f"event: {name}\n{lines}\n"


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
