"""What another site can make the browser of a logged-in admin send: nothing of it does anything.

The other site is real, in the same Chromium: as another site (localhost) and as another port of
the dashboard's own host, which browsers give the session cookie even where it is SameSite=Strict.
Each way of sending is tried on every unsafe route; all tables are compared, and the answers are
read at the server. The same forms sent by a page of the dashboard do what they say.
"""

import html
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import Error as PlaywrightError

from app.admin import dashboard as dashboard_module
from app.stack.postgres import EmbeddedPostgres
from app.stack.redis import EmbeddedRedis
from tests.admin.routes import routes
from tests.browser.chromium import sign_in
from tests.browser.detector import Detector, look
from tests.browser.foreign_pages import (
    CROSS,
    FORMS,
    SAME,
    SEND_ALL,
    Act,
    Scene,
    by_get,
    form,
    in_a_frame,
    script,
    things_to_do,
)
from tests.browser.foreign_site import Site, opened
from tests.browser.loopback import Answer, Premises, premises, until
from tests.browser.visitor import SUBMIT
from tests.fixtures.servers import cloned

UNSAFE: Final = [route for route in routes() if not route.startswith("GET ")]
REFUSED: Final = "This was not sent by a page of this dashboard"


@pytest.fixture(scope="module")
def served(
    postgres: EmbeddedPostgres,
    template_database: str,
    redis_server: EmbeddedRedis,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Premises]:
    """Serve one dashboard for all tests."""
    folder = tmp_path_factory.mktemp("foreign")
    with (
        cloned(postgres, template_database) as url,
        premises(folder, url, redis_server.url) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Serve the other site."""
    with opened() as made:
        yield made


@pytest.fixture(scope="module")
def quiet_scene(chromium: Browser, served: Premises, site: Site) -> Iterator[Scene]:
    """Log an admin in once, for the tests in which nothing may happen."""
    with a_scene(chromium, served, site) as made:
        yield made


@pytest.fixture
def scene(quiet_scene: Scene) -> Scene:
    """Give the scene in which nothing may happen."""
    quiet_scene.forget()
    return quiet_scene


@pytest.fixture
def own_scene(chromium: Browser, served: Premises, site: Site) -> Iterator[Scene]:
    """Log an admin in for one test, which does all that there is to do."""
    with a_scene(chromium, served, site) as made:
        yield made


@contextmanager
def a_scene(chromium: Browser, served: Premises, site: Site) -> Iterator[Scene]:
    """Log an admin in, and make things that something could be done to."""
    acts = things_to_do(served)
    context = chromium.new_context()
    context.set_default_timeout(60_000)
    page = context.new_page()
    sign_in(page, served.base, served.admin_key("victim"))
    page.close()
    made = Scene(served, context, site, acts)
    made.forget()
    yield made
    context.close()


def attack(scene: Scene, distance: str, page: str, window: Page | None = None) -> Page:
    """Open a page of the other site, in a new window where none is given."""
    scene.site.pages["/"] = page
    opened_page = window or scene.context.new_page()
    try:
        opened_page.goto(f"{scene.foreign(distance)}/", wait_until="commit")
    except PlaywrightError as error:
        # The page may lead its window away before its own coming was reported.
        if "interrupted by another navigation" not in error.message:
            raise
    return opened_page


def wait_for_all(scene: Scene, page: Page, method: str = "POST") -> list[Answer]:
    """Wait until the server has answered each act; give the answers to that method."""
    paths = {act.path for act in scene.acts}

    def answered() -> list[Answer]:
        return [answer for answer in scene.answers() if answer.method == method]

    until(
        lambda: paths <= {answer.path for answer in answered()},
        f"an answer to each of {sorted(paths)}",
        lambda: page.wait_for_timeout(20),
    )
    return answered()


def leave(scene: Scene) -> None:
    """Close what the other site has opened."""
    for page in scene.context.pages:
        page.close()


def assert_still_logged_in(scene: Scene) -> None:
    assert "victim" in scene.context.request.get(f"{scene.base}/admin/models").text()


def test_every_unsafe_route_has_a_form(served: Premises):
    assert sorted(act.route for act in things_to_do(served)) == sorted(UNSAFE)
    assert len(FORMS) >= 12


@pytest.mark.parametrize("name", FORMS)
def test_no_form_of_another_site_does_anything(scene: Scene, name: str):
    distance, write, has_cookie = FORMS[name]
    page_text = write(scene)
    before = scene.contents()
    page = attack(scene, distance, page_text)
    answers = wait_for_all(scene, page)
    leave(scene)
    assert {answer.status for answer in answers} == {403}
    assert {answer.site for answer in answers} <= {CROSS, SAME}
    assert {answer.has_cookie for answer in answers} == {has_cookie}
    assert scene.contents() == before
    assert_still_logged_in(scene)


@pytest.mark.parametrize("distance", [CROSS, SAME])
def test_a_form_that_takes_the_whole_window_leads_to_a_page_that_refuses(
    scene: Scene, distance: str
):
    before = scene.contents()
    window = scene.context.new_page()
    for act in scene.acts:
        written = form(scene, act, 0).replace('target="frame0"', "")
        attack(scene, distance, f"<!doctype html>{written}{SEND_ALL}", window)
        expect(window.get_by_text(REFUSED)).to_be_visible()
        assert window.url == f"{scene.base}{act.path}"
    leave(scene)
    posted = [answer for answer in scene.answers() if answer.method == "POST"]
    assert [answer.status for answer in posted] == [403] * len(scene.acts)
    assert scene.contents() == before
    assert_still_logged_in(scene)


@pytest.mark.parametrize("distance", [CROSS, SAME])
def test_a_script_of_another_site_may_not_even_ask(scene: Scene, distance: str):
    # What no form can send is asked for first; headers that a browser keeps for itself stay its.
    code = """
      const headers = {"content-type": "application/json", "sec-fetch-site": "same-origin",
        "origin": "http://127.0.0.1", "x-http-method-override": "POST"};
      for (const method of ["POST", "PUT", "PATCH", "DELETE"]) {
        fetch(address, {method, headers, credentials: "include", body: "{}"}).catch(() => null);
      }
    """
    before = scene.contents()
    page = attack(scene, distance, script(scene, code))
    answers = wait_for_all(scene, page, "OPTIONS")
    leave(scene)
    assert {answer.status for answer in answers} == {403}
    assert {answer.method for answer in scene.answers()} == {"OPTIONS"}
    assert scene.contents() == before
    assert_still_logged_in(scene)


@pytest.mark.parametrize("distance", [CROSS, SAME])
def test_nothing_of_the_dashboard_can_be_loaded_into_a_page_of_another_site(
    scene: Scene, distance: str
):
    code = """
      const query = address + "?_method=POST&" + body;
      const add = (tag, more) => document.documentElement.append(
        Object.assign(document.createElement(tag), more));
      add("img", {src: query});
      add("script", {src: query});
      add("link", {rel: "stylesheet", href: query});
      add("link", {rel: "prefetch", href: query});
      add("iframe", {src: query});
      add("object", {data: query});
      add("embed", {src: query});
      add("video", {src: query});
      fetch(query, {mode: "no-cors", credentials: "include"}).catch(() => null);
    """
    wanted = {"image", "script", "style", "iframe", "object", "embed", "video", "empty"}
    before = scene.contents()
    page = attack(scene, distance, script(scene, code))
    until(
        lambda: wanted <= {answer.dest for answer in scene.answers()},
        f"requests for {wanted}",
        lambda: page.wait_for_timeout(20),
    )
    answers = wait_for_all(scene, page, "GET")
    leave(scene)
    assert {answer.status for answer in answers} == {403}, {(a.dest, a.status) for a in answers}
    assert scene.contents() == before
    assert_still_logged_in(scene)


@pytest.mark.parametrize("distance", [CROSS, SAME])
def test_a_window_that_another_site_leads_to_a_route_changes_nothing(scene: Scene, distance: str):
    before = scene.contents()
    window = scene.context.new_page()
    for act in scene.acts:
        page_text = by_get(scene, act)

        def led(act: Act = act, page_text: str = page_text) -> bool:
            attack(scene, distance, page_text, window)
            window.wait_for_url(lambda address: address.startswith(f"{scene.base}/admin"))
            return act.path in {answer.path for answer in scene.answers()}

        # A page that leads away by itself may get ahead of the next one's coming.
        until(led, f"the window to be led to {act.path}")
    leave(scene)
    assert {act.path for act in scene.acts} <= {answer.path for answer in scene.answers()}
    assert {answer.method for answer in scene.answers()} == {"GET"}
    assert all(answer.status in {200, 303, 404, 405} for answer in scene.answers())
    assert scene.contents() == before
    assert_still_logged_in(scene)


@pytest.mark.parametrize("distance", [CROSS, SAME])
def test_a_site_that_opens_the_dashboard_holds_no_handle_of_it(scene: Scene, distance: str):
    page = attack(scene, distance, "<!doctype html><title>Elsewhere</title>")
    with scene.context.expect_page() as found:
        page.evaluate("(address) => { window.held = window.open(address); }", f"{scene.base}/admin")
    window = found.value
    expect(window.get_by_role("heading", name="Overview")).to_be_visible()
    assert window.evaluate("window.opener") is None
    # The browser tells the opener's process that its handle is cut after the dashboard is shown.
    page.wait_for_function("window.held.closed")
    leave(scene)


def test_a_link_from_another_site_leads_in_and_brings_nothing_along(own_scene: Scene):
    scene = own_scene
    detector = Detector(scene.context)
    text = "\"><svg onload=ran(1)>'"
    address = f"{scene.base}/admin/accounts?name=%22%3E%3Csvg%20onload=ran(1)%3E'"
    link = f'<!doctype html><a href="{html.escape(address)}">Look at this</a>'
    page = attack(scene, CROSS, link)
    page.get_by_text("Look at this").click()
    expect(page.get_by_role("heading", name="Accounts", exact=True)).to_be_visible()
    seen = look(page)
    assert text in seen.values
    assert (seen.strange, seen.ran, detector.ran) == ([], [], [])
    led = [answer for answer in scene.answers() if answer.path == "/admin/accounts"]
    ways = [(answer.site, answer.has_cookie) for answer in led]
    assert ways == [(CROSS, False), ("same-origin", True)]
    leave(scene)


def test_the_same_forms_sent_by_the_dashboard_work(own_scene: Scene):
    page = own_scene.context.new_page()
    for act in own_scene.acts:
        page.goto(f"{own_scene.base}/admin/models")
        before = own_scene.contents()
        own_scene.forget()
        with page.expect_navigation():
            page.evaluate(SUBMIT, [act.path, list(act.fields.items())])
        sent = next(answer for answer in own_scene.answers() if answer.method == "POST")
        assert sent.status in {200, 303}, act.route
        assert (sent.site, sent.has_cookie) == ("same-origin", True)
        changed = own_scene.contents() != before
        assert changed == (not act.path.endswith("/tokens/ask")), act.route
    page.close()


def test_without_the_check_the_form_of_another_port_would_have_worked(
    own_scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dashboard_module, "check_same_origin", lambda *_: None)
    ends = {"POST /admin/login", "POST /admin/logout"}
    own_scene.acts = [act for act in own_scene.acts if act.route not in ends]
    before = own_scene.contents()
    away = attack(own_scene, CROSS, in_a_frame(own_scene))
    assert not any(answer.has_cookie for answer in wait_for_all(own_scene, away))
    assert own_scene.contents() == before
    own_scene.forget()
    near = attack(own_scene, SAME, in_a_frame(own_scene))
    assert {answer.status for answer in wait_for_all(own_scene, near)} <= {200, 303, 409}
    leave(own_scene)
    after = own_scene.contents()
    changed = {name for name in after if after[name] != before[name]}
    assert changed >= {"accounts", "api_keys", "audit_log", "entries", "jobs"}
