"""Hostile texts in every free text of the service: all are shown, none does anything.

Escaping is the wall, the content security policy only the moat: the pages of Jobs and requests,
lists and live pieces are opened in Chromium once under the policy and once with the policy taken
away, pages of accounts and those that repeat what they were sent only without it. The first test
shows on a careless page of our own that the payloads bite and that the detector sees it.
"""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import quote, urlencode
from uuid import uuid4

import pytest
from playwright.sync_api import Browser, Page

from app.admin import live, overview
from app.admin.filters import excerpt
from app.stack.postgres import EmbeddedPostgres
from app.stack.redis import EmbeddedRedis
from tests.browser.detector import Detector, look
from tests.browser.foreign_site import Site, opened
from tests.browser.full_house import (
    ACCOUNT_PACKS,
    JOB_PACKS,
    ROUNDS,
    House,
    build,
    pair_of,
    show_round,
)
from tests.browser.loopback import premises, until
from tests.browser.payloads import (
    BREAKS,
    CHARS_MAX,
    PAYLOADS,
    PLACES,
    RAW,
    RUNS,
    WITH_NUL,
    packed,
    tagged,
    together,
)
from tests.browser.visitor import Visitor, missing_in, visiting
from tests.fixtures.servers import cloned

REFLECTED = [together(texts) for texts in packed(PAYLOADS, 180)]
BITE_SECONDS = 60.0
NOTES = [together(texts) for texts in packed(PAYLOADS, 480, most=50)]


@pytest.fixture(scope="module")
def house(
    postgres: EmbeddedPostgres,
    template_database: str,
    redis_server: EmbeddedRedis,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[House]:
    """Build the service whose every text is a payload, once for all tests."""
    folder = tmp_path_factory.mktemp("house")
    with (
        cloned(postgres, template_database) as url,
        premises(folder, url, redis_server.url) as served,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(live, "LOOK_SECONDS", 0.1)
        patch.setattr(live, "SHARED_SECONDS", 0.05)
        yield build(served, folder)


@pytest.fixture(scope="module", params=[False, True], ids=["policy", "no-policy"])
def visitor(chromium: Browser, house: House, request: pytest.FixtureRequest) -> Iterator[Visitor]:
    """A visitor under the dashboard's policy, then one without."""
    with visiting(chromium, house, bypass_csp=request.param) as made:
        yield made


@pytest.fixture(scope="module")
def unguarded(chromium: Browser, house: House) -> Iterator[Visitor]:
    """A visitor whom no policy guards."""
    with visiting(chromium, house, bypass_csp=True) as made:
        yield made


def test_there_are_many_payloads_and_no_two_are_the_same():
    assert len(PAYLOADS) >= 50
    assert len(set(PAYLOADS)) == len(PAYLOADS)
    assert max(map(len, PAYLOADS)) <= CHARS_MAX
    assert all(text == text.strip() for text in PAYLOADS)
    assert set(RUNS) | set(BREAKS) == set(PLACES)


def test_on_a_careless_page_every_payload_bites_and_is_seen(chromium: Browser):
    context = chromium.new_context()
    detector = Detector(context)
    page = context.new_page()
    duds = []
    with opened() as site:
        run = [(text, PLACES[place].format(text)) for place in RUNS for text in RUNS[place]]
        # A window gives its focus once, so that what waits for it needs one of its own.
        for text, piece in run:
            if "autofocus" in text:
                _go_carelessly(page, detector, site, piece)
                if not _soon(page, lambda: bool(detector.ran)):
                    duds.append(text)
        framed: dict[str, str] = {}
        for number, (text, piece) in enumerate(run):
            if "autofocus" not in text:
                framed[f"/{number}"] = text
                site.pages[f"/{number}"] = _carelessly(piece)
        frames = "".join(f"<iframe src={path}></iframe>" for path in framed)
        _go_carelessly(page, detector, site, frames)
        left = partial(_without_a_run, detector, framed)
        if not _soon(page, lambda: not left()):
            duds += left()
        for place, texts in BREAKS.items():
            _go_carelessly(page, detector, site, PLACES[place].format("harmless"))
            usual = _marks(page, detector)
            for text in texts:
                _go_carelessly(page, detector, site, PLACES[place].format(text))
                if not _soon(page, partial(_is_marked, page, detector, usual)):
                    duds.append(text)
        context.close()
    assert duds == []


def _soon(page: Page, true: Callable[[], bool]) -> bool:
    """Tell whether something comes true within a moment."""
    deadline = time.monotonic() + BITE_SECONDS
    while not true():
        if time.monotonic() > deadline:
            return False
        page.wait_for_timeout(20)
    return True


def _go_carelessly(page: Page, detector: Detector, site: Site, piece: str) -> None:
    """Open a page of somebody's who does not escape."""
    page.goto("about:blank")  # the page before is gone, and says nothing more
    detector.ran.clear()
    detector.asked.clear()
    site.pages["/page"] = _carelessly(piece)
    page.goto(f"{site.same_site}/page")


def _carelessly(piece: str) -> str:
    return f"<!doctype html><title>A page</title>{piece}<p id=open>end</p>"


def _without_a_run(detector: Detector, framed: dict[str, str]) -> list[str]:
    """List the texts, each by the path of its frame, that have not run."""
    ran = {f"/{note.rsplit('/', 1)[1]}" for note in detector.ran}
    return [text for path, text in framed.items() if path not in ran]


def _marks(page: Page, detector: Detector) -> object:
    """Tell what a text left in a page: odd elements, requests, whether the page has its end."""
    asked = {address for _, address in detector.asked}
    return look(page).strange, asked, page.query_selector("#open") is not None


def _is_marked(page: Page, detector: Detector, usual: object) -> bool:
    return _marks(page, detector) != usual


def _moment(page: Page) -> Callable[[], None]:
    return lambda: page.wait_for_timeout(20)


def test_the_page_of_a_job_shows_its_texts_and_runs_none(visitor: Visitor):
    for number, texts in enumerate(JOB_PACKS):
        name, owner = together(texts), together(ACCOUNT_PACKS[number])
        shown = [tagged(name, "j"), tagged(owner, "a")]
        for kind in "nvpt":
            shown += [tagged(text, kind) for text in texts]
        shown += [tagged(text, kind) for text in texts for kind in "em"]
        shown += [excerpt(tagged(text, "c"), 40) for text in texts if text.isprintable()]
        path = f"/admin/jobs/{visitor.house.packs[name]}"
        seen = visitor.visit(path, *shown, wait_for=".sample")
        assert not missing_in(seen.title, [tagged(name, "j")])


def test_the_page_of_a_request_shows_its_texts_and_runs_none(visitor: Visitor):
    names = [together(texts) for texts in JOB_PACKS]
    for index, texts in enumerate(JOB_PACKS):
        name = names[index]
        named = together([text for text in texts if text.isprintable()])
        first, second = pair_of(names, index)
        shown = [tagged(name, "p"), tagged(named, "c") if named else ""]
        shown += [json.dumps(tagged(text, "s"), ensure_ascii=False) for text in texts[:4]]
        if index % 2 == 0:
            shown += [tagged(first, "t"), tagged(second, "t")]
        else:
            shown += [tagged(first, "e"), tagged(first, "m"), tagged(second, "m")]
        visitor.visit(f"/admin/jobs/{visitor.house.requests}/requests/{index}", *shown)


def test_the_page_of_an_account_shows_its_texts_and_runs_none(unguarded: Visitor):
    for texts in ACCOUNT_PACKS:
        name = together(texts)
        shown = [tagged(name, "a"), tagged(name, "r")]
        shown += [tagged(text, kind) for text in texts for kind in "gq"]
        shown += [excerpt(tagged(text, "k"), 40) for text in texts]
        unguarded.visit(f"/admin/accounts/{unguarded.house.accounts[name]}", *shown)


def test_lists_show_every_text_and_run_none(visitor: Visitor):
    house = visitor.house
    packs = [together(texts) for texts in JOB_PACKS]
    owners = [together(texts) for texts in ACCOUNT_PACKS]
    lists = {
        "/admin/jobs": [
            *(excerpt(tagged(name, "j"), 60) for name in (*PAYLOADS, *packs)),
            *(excerpt(tagged(text, "a"), 40) for text in PAYLOADS),
        ],
        "/admin/accounts": [excerpt(tagged(name, "a"), 80) for name in (*PAYLOADS, *owners)],
        "/admin/audit": [
            *(excerpt(tagged(text, "o"), 60) for text in PAYLOADS),
            *(tagged(text, kind) for text in PAYLOADS for kind in "ag"),
            *(tagged(name, "r") for name in owners),
        ],
        f"/admin/jobs/{house.errors}/requests": [
            *(excerpt(tagged(text, "c"), 60) for text in PAYLOADS if text.isprintable()),
            *(tagged(text, "e") for text in PAYLOADS),
            *(excerpt(tagged(text, "m"), 90) for text in PAYLOADS),
        ],
        f"/admin/accounts/{house.operators}": [excerpt(tagged(text, "o"), 40) for text in PAYLOADS],
        f"/admin/accounts/{house.accounts[owners[0]]}/ledger": [
            tagged(text, "g") for text in ACCOUNT_PACKS[0]
        ],
        "/admin/workers": [
            *(tagged(text, kind) for text in PAYLOADS for kind in "hdy"),
            *(excerpt(tagged(text, "w"), 40) for text in PAYLOADS),
        ],
    }
    for path, shown in lists.items():
        text, _pages = visitor.walk(path)
        missing = missing_in(text, shown)
        assert not missing, f"{path} does not show {missing}"


def test_the_system_page_shows_engines_and_who_checked_the_invariants(visitor: Visitor):
    visitor.visit("/admin/system")
    with visitor.page.expect_navigation():
        visitor.page.get_by_role("button", name="Check them now").click()
    ran_by = excerpt(tagged(PAYLOADS[visitor.turn], "o"), 60)
    seen = look(visitor.page)
    visitor.assert_quiet(seen, documents=2)  # the form, and where it leads
    assert not missing_in(seen.text, [ran_by])
    for kind in "hwd":
        assert not missing_in(seen.text, [tagged(text, kind) for text in PAYLOADS])


def test_pieces_of_the_live_stream_show_every_text_and_run_none(visitor: Visitor):
    house, context = visitor.house, visitor.page.context
    visitor.visit("/admin", wait_for="[data-live]:not([hidden])")
    job, jobs, models = (context.new_page() for _ in range(3))
    job.goto(f"{visitor.base}/admin/jobs/{house.live}")
    jobs.goto(f"{visitor.base}/admin/jobs")
    visitor.detector.asked.clear()
    for texts in ROUNDS:
        show_round(house, texts)
        named = [excerpt(tagged(text, "j"), 60) for text in texts]
        named += [excerpt(tagged(text, "a"), 40) for text in texts]
        errors = [tagged(text, "m") for text in texts]
        overview_shows = {
            "live-jobs": named,
            "queues": [excerpt(tagged(text, "w"), 60) for text in texts],
            "crew": [excerpt(tagged(text, kind), 40) for text in texts for kind in "hw"],
            "errors": [*errors, *(excerpt(tagged(text, "e"), 60) for text in texts)],
        }
        job_shows = {
            "state": [tagged(together(texts), "m")],
            "errors": [*errors, *(tagged(text, "e") for text in texts)],
        }
        _follow(visitor.page, overview_shows)
        _follow(job, job_shows)
        _follow(jobs, {"jobs": named})
        attention = look(visitor.page).regions["attention"]
        assert any(not missing_in(attention, [tagged(text, "y")]) for text in texts)
        models.goto(f"{visitor.base}/admin/models")
        strangers = look(models).text
        shown = [text for text in texts if not missing_in(strangers, [tagged(text, "w")])]
        assert len(shown) >= len(texts) - 1  # the list is cut after 300 characters
        for page in (visitor.page, job, jobs, models):
            seen = look(page)
            assert (seen.strange, seen.ran) == ([], [])
    visitor.assert_quiet(look(visitor.page), documents=len(ROUNDS))
    for page in (job, jobs, models):
        page.close()


def _follow(page: Page, wanted: dict[str, list[str]]) -> None:
    """Wait until the pieces of a page show these texts."""

    def is_there() -> bool:
        regions = look(page).regions
        return not any(missing_in(regions[name], texts) for name, texts in wanted.items())

    until(is_there, f"{page.url} to show {wanted}", _moment(page))


def test_what_an_address_says_is_shown_and_does_not_run(unguarded: Visitor):
    errors = unguarded.house.errors
    for text in REFLECTED:
        unguarded.visit(f"/admin/jobs?{urlencode({'q': text})}", text)
        unguarded.visit(f"/admin/jobs/cancel?{urlencode({'q': text})}", text)
        unguarded.visit(f"/admin/accounts?{urlencode({'name': text})}", text)
        asked = urlencode({"code": text, "custom_id": text[::-1]})
        unguarded.visit(f"/admin/jobs/{errors}/requests?{asked}", text, text[::-1])
    whole = together(PAYLOADS)
    asked = urlencode({"target": whole, "key": whole, "action": whole})
    seen = unguarded.visit(f"/admin/audit?{asked}", whole)
    assert sum(not missing_in(value, [whole]) for value in seen.values) == 2
    for text in RAW:
        unguarded.visit(f"/admin/jobs?q={text}", "ran(1)", "\ufffd")
        unguarded.visit(f"/admin/{text}", "ran(1)", "\ufffd", status=404, is_bare=True)


def test_pages_that_do_not_exist_say_so_and_run_nothing(unguarded: Visitor):
    # A path ends at a question mark or a hash, and tabs and line ends fall out of it.
    texts = [text for text in PAYLOADS if not set(text) & set("?#\t\r\n")]
    packs = [together(texts) for texts in packed(texts, 180)]
    house = unguarded.house
    said: list[tuple[str, int, Callable[[str], str]]] = [
        ("/admin/accounts/", 80, repr),
        ("/admin/jobs/", 80, repr),
        (f"/admin/jobs/{house.errors}/requests/", 40, repr),
        (f"/admin/jobs/{house.errors}/files/", 200, repr),
    ]
    for number, text in enumerate(packs):
        told = text.replace("\\", "%5C")  # Starlette reads no backslash into a path
        unguarded.visit(
            f"/admin/{quote(text, safe='')}", f"/admin/{told}", status=404, is_bare=True
        )
        path, chars, shown = said[number % len(said)]
        # A slash would end the segment.
        piece = text.replace("/", "|")
        unguarded.visit(f"{path}{quote(piece, safe='')}", shown(piece[:chars]), status=404)
    for text in WITH_NUL:
        unguarded.visit(f"/admin/jobs?q={text}", "U+0000", status=400, is_bare=True)
        unguarded.visit(
            f"/admin/{quote(text, safe='%')}", "There is no page", status=404, is_bare=True
        )


def test_what_a_form_says_is_shown_and_does_not_run(unguarded: Visitor):
    name = together(ACCOUNT_PACKS[0])
    account = f"/admin/accounts/{unguarded.house.accounts[name]}"
    unguarded.visit(account)
    for note in NOTES:
        asked = [("kind", "grant"), ("amount", "5"), ("note", note)]
        seen = unguarded.send(f"{account}/tokens/ask", asked, note, tagged(name, "a")[:50])
        assert any(not missing_in(value, [note]) for value in seen.values)
    for text in REFLECTED:
        asked = [("name", text), ("scopes", "completions"), ("form_token", str(uuid4()))]
        unguarded.send(f"{account}/keys", asked, f"The key {text} may", "sk_live_")
    for text in (PAYLOADS[0], PAYLOADS[30], PAYLOADS[-2]):
        wrong = [("kind", text), ("amount", "5"), ("note", "x")]
        unguarded.send(f"{account}/tokens/ask", wrong, repr(text[:50]))


def test_the_login_page_shows_no_more_than_a_path_of_the_dashboard(unguarded: Visitor):
    unguarded.page.context.clear_cookies()
    able = [text for text in PAYLOADS if min(text) > " " and not set(text) & set("\\\x7f")]
    where = "/admin/" + "|".join(text for text in able if ".." not in text)[:1900]
    for asked, kept in ((where, where), *((text, "/admin") for text in REFLECTED)):
        answer = unguarded.page.goto(f"{unguarded.base}/admin/login?{urlencode({'next': asked})}")
        assert answer is not None
        assert answer.status == 200
        assert unguarded.read().values == [kept, ""]
    login = [("key", PAYLOADS[0]), ("next", where)]
    assert where in unguarded.send("/admin/login", login, "does not open the dashboard").values


def test_the_name_of_a_series_is_shown_and_does_not_run(
    unguarded: Visitor, monkeypatch: pytest.MonkeyPatch
):
    # Nobody but the code names a series; the chart must hold it off all the same.
    real = overview._series
    name = together([text for text in PAYLOADS if "\n" not in text and "\r" not in text])
    monkeypatch.setattr(
        overview, "_series", lambda minutes, kind, *_: real(minutes, kind, name, "x")
    )
    with unguarded.house.premises.database.transaction() as conn:
        conn.execute(
            """
            INSERT INTO samples (at, seconds, requests, errored, tokens)
            SELECT now() - interval '5 minutes', 60, 3, 0, 90
            WHERE NOT EXISTS (SELECT 1 FROM samples)
            """
        )
    seen = unguarded.visit("/admin", wait_for="[data-reading] b")
    assert not missing_in(seen.regions["charts"], [name])


def test_the_api_takes_no_text_that_cannot_be_stored(house: House):
    headers = {"authorization": f"Bearer {house.keys[PAYLOADS[0]]}"}
    unprintable = [text for text in PAYLOADS if not text.isprintable()]
    assert unprintable
    with house.premises.client(**headers) as client:
        for text in unprintable:
            requests = [{"prompt": "hi", "custom_id": text}]
            answer = client.post("/v1/jobs", json={"model": "tiny", "requests": requests})
            assert answer.status_code == 400, text
            assert "custom_id" in answer.json()["error"]["message"]
        for field in (
            {"name": "<scr\0ipt>"},
            {"metadata": {"a\0": "b"}},
            {"metadata": {"a": "\0"}},
        ):
            body = {"model": "tiny", "requests": [{"prompt": "hi"}], **field}
            assert client.post("/v1/jobs", json=body).status_code == 400, field
