"""The list of Jobs: filters, pages by key, and the cancel of everything that a filter names.

A bulk cancel is two steps: a page that counts and changes nothing, and the form on it, which names
the moment that was counted at.
"""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.admin.access import PATH, Operator, operator_of, require_role
from app.admin.actions import CANCELLABLE, JobFilter, cancel_jobs
from app.admin.followed import Followed, live_at, stands_still
from app.admin.forms import FormDep
from app.admin.job_reads import JobPage, JobSearch, Place, list_jobs
from app.admin.pages import render
from app.catalog.deps import CatalogDep
from app.errors import InvalidRequestError
from app.jobs.states import JobState
from app.kit.db import Conn
from app.kit.deps import DatabaseDep
from app.kit.ids import parse_id

router = APIRouter(dependencies=[Depends(operator_of)])
Steward = Annotated[Operator, Depends(require_role("operator"))]

TEXT_MAX: Final = 200
ID_DIGITS: Final = 32
UNFINISHED: Final = "unfinished"
AGES: Final = {
    "hour": ("Last hour", timedelta(hours=1)),
    "day": ("Last 24 hours", timedelta(days=1)),
    "week": ("Last 7 days", timedelta(days=7)),
    "month": ("Last 30 days", timedelta(days=30)),
}
STATES: Final = (
    (UNFINISHED, "Not over yet"),
    *((state.value, state.value.replace("_", " ").capitalize()) for state in JobState),
)
# The piece of the page that is sent anew when it changes: name of the event, template.
PIECES: Final = {"jobs": "_job_list.html"}
FIELDS: Final = ("status", "model", "account", "q", "age")


@router.get("/jobs")
def show_jobs(request: Request, database: DatabaseDep, catalog: CatalogDep) -> Response:
    """List Jobs, newest first."""
    asked = _asked(request)
    whole = parse_id("job", asked["q"])
    if whole is not None:
        return RedirectResponse(f"{PATH}/jobs/{asked['q']}", 303)
    search = _search(asked)
    after = _place(request.query_params.get("after"))
    page = database.read(lambda conn: list_jobs(conn, search, after=after))
    query = _query(asked)
    return render(
        request,
        "jobs.html",
        **_list_context(asked, page, after),
        **(stands_still(_address(asked)) if after else live_at("jobs", **query)),
        states=STATES,
        ages=[(name, label) for name, (label, _) in AGES.items()],
        models=[model.name for model in catalog.all()],
        cancel=_cancel_link(search, query) if query else None,
        said=_said(request),
    )


def followed(request: Request) -> Followed:
    """Say how the first page of the list that was asked for is followed.

    Raises InvalidRequestError.
    """
    asked = _asked(request)
    _search(asked)

    def read(conn: Conn) -> dict[str, Any]:
        # Searched anew: "the last hour" moves on.
        return _list_context(asked, list_jobs(conn, _search(asked)), None)

    return Followed(key=f"jobs {urlencode(_query(asked))}", read=read, pieces=PIECES)


def _list_context(asked: dict[str, str], page: JobPage, after: Place | None) -> dict[str, Any]:
    """Give what the list itself needs: its rows, and where the pages beside it begin."""
    query = _query(asked)
    older = None
    if page.next is not None:
        cursor = f"{page.next.created_at.isoformat()}~{page.next.id.hex}"
        older = f"{PATH}/jobs?{urlencode({**query, 'after': cursor})}"
    first = None if after is None else _address(asked)
    return {"page": page, "asked": asked, "older": older, "first": first}


def _address(asked: dict[str, str]) -> str:
    return f"{PATH}/jobs?{urlencode(_query(asked))}"


@router.get("/jobs/cancel")
def ask_cancel(request: Request, operator: Steward, database: DatabaseDep) -> HTMLResponse:
    """Count what a bulk cancel would end; nothing is changed."""
    asked = _asked(request)
    search = _bulk_search(asked)
    counted = cancel_jobs(database, operator, search.chosen, dry_run=True)
    assert counted.filter.until is not None, "a dry run names its moment"
    return render(
        request,
        "cancel_jobs.html",
        counted=counted,
        asked=asked,
        filter=[(name, asked[name]) for name in FIELDS if asked[name]],
        until=counted.filter.until.isoformat(),
        since=None if search.chosen.since is None else search.chosen.since.isoformat(),
        back=_address(asked),
    )


@router.post("/jobs/cancel")
def cancel_filtered(operator: Steward, form: FormDep, database: DatabaseDep) -> Response:
    """Cancel what was counted."""
    asked = {name: form.text(name, needed=False) for name in FIELDS}
    chosen = _bulk_search(asked).chosen
    since = _moment("since", form.text("since", needed=False))
    if asked["age"] and since is None:
        msg = "since is missing: it is the moment that age was counted from. Count again."
        raise InvalidRequestError(msg, param="since")
    chosen = JobFilter(
        account_id=chosen.account_id,
        model=chosen.model,
        state=chosen.state,
        name=chosen.name,
        since=since,
        until=_moment("until", form.text("until")),
    )
    done = cancel_jobs(database, operator, chosen, dry_run=False)
    said = {"cancelled": done.jobs, **({"more": 1} if done.more else {})}
    return RedirectResponse(f"{PATH}/jobs?{urlencode({**_query(asked), **said})}", 303)


def _query(asked: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in asked.items() if value}


def _asked(request: Request) -> dict[str, str]:
    return {name: request.query_params.get(name, "").strip()[:TEXT_MAX] for name in FIELDS}


def _search(asked: dict[str, str]) -> JobSearch:
    """Read what was asked for. Raises InvalidRequestError naming what cannot be read."""
    account_id = parse_id("acct", asked["account"]) if asked["account"] else None
    if asked["account"] and account_id is None:
        msg = f"account must be an id like acct_0191…, not {asked['account'][:80]!r}."
        raise InvalidRequestError(msg, param="account")
    if asked["status"] not in ("", UNFINISHED, *JobState):
        msg = f"status must be {UNFINISHED} or one of {', '.join(JobState)}."
        raise InvalidRequestError(msg, param="status")
    if asked["age"] not in ("", *AGES):
        msg = f"age must be one of {', '.join(AGES)}."
        raise InvalidRequestError(msg, param="age")
    plain = asked["status"] in ("", UNFINISHED)
    ids = _id_range(asked["q"])
    return JobSearch(
        chosen=JobFilter(
            account_id=account_id,
            model=asked["model"] or None,
            state=None if plain else JobState(asked["status"]),
            name=(asked["q"] or None) if ids is None else None,
            since=datetime.now(UTC) - AGES[asked["age"]][1] if asked["age"] else None,
        ),
        unfinished=asked["status"] == UNFINISHED,
        ids=ids,
    )


def _bulk_search(asked: dict[str, str]) -> JobSearch:
    """Read which Jobs a bulk cancel means. Raises InvalidRequestError."""
    search = _search(asked)
    if search.ids is not None:
        msg = "A search by id names single Jobs; open the Job and cancel it there."
        raise InvalidRequestError(msg, param="q")
    return search


def _id_range(text: str) -> tuple[UUID, UUID] | None:
    """Read the beginning of a Job's id as the range of ids that begin so."""
    kind, _, digits = text.partition("_")
    if kind != "job" or not digits or len(digits) > ID_DIGITS:
        return None
    if not set(digits) <= set("0123456789abcdef"):
        return None
    return UUID(hex=digits.ljust(ID_DIGITS, "0")), UUID(hex=digits.ljust(ID_DIGITS, "f"))


def _place(text: str | None) -> Place | None:
    if not text:
        return None
    moment, _, digits = text.partition("~")
    job_id = parse_id("job", f"job_{digits}")
    if job_id is None:
        msg = "after is not a place in this list; begin with its first page."
        raise InvalidRequestError(msg, param="after")
    when = _moment("after", moment)
    assert when is not None, "it is not empty, or the id was refused"
    return Place(when, job_id)


def _moment(name: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None or not 1970 < moment.year < 9000:
        msg = f"{name} must be a moment in ISO 8601 with its offset, not {text[:60]!r}."
        raise InvalidRequestError(msg, param=name)
    return moment


def _cancel_link(search: JobSearch, query: dict[str, str]) -> str | None:
    """Lead to the bulk cancel of this list, where it can cancel anything."""
    state = search.chosen.state
    if search.ids is not None or (state is not None and state not in CANCELLABLE):
        return None
    return f"{PATH}/jobs/cancel?{urlencode(query)}"


def _said(request: Request) -> dict[str, Any] | None:
    """Read what the bulk cancel before reports; only numbers come from the address."""
    cancelled = request.query_params.get("cancelled", "")
    if not (cancelled.isascii() and cancelled.isdecimal() and len(cancelled) < 10):
        return None
    return {"cancelled": int(cancelled), "more": request.query_params.get("more") == "1"}
