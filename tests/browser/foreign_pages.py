"""Pages by which another site tries to act through the browser of somebody who is logged in.

Each page tries every unsafe route of the dashboard, with a form that would work if it came from
the dashboard itself; FORMS lists the ways of sending them.
"""

import html
import json
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from playwright.sync_api import BrowserContext
from psycopg import sql

from app.accounts.accounts import create_key
from app.kit.db import Database
from app.kit.ids import public_id
from app.ledger.holds import stop_holds
from tests.admin.people import form_token
from tests.browser.foreign_site import Site
from tests.browser.loopback import Answer, Premises
from tests.fixtures.api import PEPPER
from tests.fixtures.builders import Builders

CROSS, SAME = "cross-site", "same-site"
SEND_ALL: Final = "<script>for (const form of document.forms) form.submit();</script>"


@dataclass(frozen=True)
class Act:
    """A form that does something: where it goes and what it says."""

    route: str
    path: str
    fields: dict[str, str]


@dataclass
class Scene:
    """An admin who is logged in with Chromium, what they could do, and somebody else's site."""

    premises: Premises
    context: BrowserContext
    site: Site
    acts: list[Act]

    @property
    def base(self) -> str:
        """The address of the dashboard."""
        return self.premises.base

    def foreign(self, distance: str) -> str:
        """The address of the other site, as far away as `distance` says."""
        return self.site.cross_site if distance == CROSS else self.site.same_site

    def contents(self) -> dict[str, list[Any]]:
        """Read every row of every table (but when a session was last seen)."""
        return contents(self.premises.database)

    def answers(self) -> list[Answer]:
        """Give the answers since `forget`."""
        return list(self.premises.recorder.answers)

    def forget(self) -> None:
        """Begin a new record of answers."""
        self.premises.recorder.answers.clear()


def things_to_do(served: Premises) -> list[Act]:
    """Write a form for every unsafe route, each of which would work."""
    builders = Builders(served.database)
    account, stopped = builders.an_account(), builders.an_account()
    with served.database.transaction() as conn:
        stop_holds(conn, stopped, "a reason")
        key = create_key(conn, account, PEPPER, name="a key").id
        conn.execute("UPDATE jobs SET name = NULL")
    job, other = builders.a_job(), builders.a_job()
    with served.database.transaction() as conn:
        conn.execute("UPDATE jobs SET name = 'the other Job' WHERE id = %s", [other.id])
    here = f"/admin/accounts/{public_id('acct', account)}"
    worker = f"/admin/workers/{public_id('worker', builders.a_worker().worker_id)}"
    tokens = {"kind": "grant", "amount": "5", "note": "a gift"}
    forms = {
        "POST /admin/accounts": ("/admin/accounts", {"name": "another"}),
        "POST /admin/accounts/{account}/tokens/ask": (f"{here}/tokens/ask", tokens),
        "POST /admin/accounts/{account}/tokens": (f"{here}/tokens", tokens),
        "POST /admin/accounts/{account}/keys": (
            f"{here}/keys",
            {"name": "a way in", "scopes": "admin", "role": "admin"},
        ),
        "POST /admin/accounts/{account}/keys/{key}/revoke": (
            f"{here}/keys/{public_id('key', key)}/revoke",
            {},
        ),
        "POST /admin/accounts/{account}/holds/stop": (f"{here}/holds/stop", {"reason": "none"}),
        "POST /admin/accounts/{account}/holds/allow": (
            f"/admin/accounts/{public_id('acct', stopped)}/holds/allow",
            {},
        ),
        "POST /admin/jobs/{job_id}/cancel": (f"/admin/jobs/{public_id('job', job.id)}/cancel", {}),
        "POST /admin/jobs/cancel": (
            "/admin/jobs/cancel",
            {"q": "the other Job", "until": "2999-01-01T00:00:00+00:00"},
        ),
        "POST /admin/workers/{worker_id}/drain": (f"{worker}/drain", {}),
        "POST /admin/workers/{worker_id}/undrain": (f"{worker}/undrain", {}),
        "POST /admin/system/invariants": ("/admin/system/invariants", {}),
        "POST /admin/login": ("/admin/login", {"key": served.admin_key("somebody else")}),
        "POST /admin/logout": ("/admin/logout", {}),
    }
    return [
        Act(route, path, {"form_token": str(uuid4()), **fields})
        for route, (path, fields) in forms.items()
    ]


def contents(database: Database) -> dict[str, list[Any]]:
    """Read every row of every table."""
    with database.transaction() as conn:
        tables = conn.execute(
            """
            SELECT relname FROM pg_class
            WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace ORDER BY relname
            """
        ).fetchall()
        return {
            table["relname"]: conn.execute(
                sql.SQL(
                    "SELECT to_jsonb(t) - 'last_seen_at' AS row FROM {} AS t ORDER BY t::text"
                ).format(sql.Identifier(table["relname"]))
            ).fetchall()
            for table in tables
        }


def form(scene: Scene, act: Act, number: int, *, action: str | None = None, more: str = "") -> str:
    """Write a form that fills its own frame."""
    fields = "".join(
        f'<input type="hidden" name="{name}" value="{html.escape(value)}">'
        for name, value in act.fields.items()
    )
    where = action or f"{scene.base}{act.path}"
    return (
        f'<iframe name="frame{number}"></iframe>'
        f'<form method="post" target="frame{number}" action="{where}" {more}>{fields}</form>'
    )


def forms(scene: Scene, more: str = "", head: str = "") -> str:
    """Write a page that sends the form of every act, each into a frame."""
    written = "".join(form(scene, act, number, more=more) for number, act in enumerate(scene.acts))
    return f"<!doctype html>{head}{written}{SEND_ALL}"


def script(scene: Scene, code: str) -> str:
    """Write a page that runs `code` for every act: its address, its fields as a form's body."""
    acts = [[f"{scene.base}{act.path}", list(act.fields.items())] for act in scene.acts]
    return f"""<!doctype html><script>
    for (const [address, fields] of {json.dumps(acts)}) {{
      const body = new URLSearchParams(fields);
      {code}
    }}
    </script>"""


def in_a_frame(scene: Scene) -> str:
    """Send forms into frames of the page."""
    return forms(scene)


def without_a_referrer(scene: Scene) -> str:
    """Send forms that do not say where they come from."""
    return forms(scene, head='<meta name="referrer" content="no-referrer">')


def as_plain_text(scene: Scene) -> str:
    """Send forms as plain text."""
    return forms(scene, more='enctype="text/plain"')


def as_multipart(scene: Scene) -> str:
    """Send forms as multipart."""
    return forms(scene, more='enctype="multipart/form-data"')


def into_new_windows(scene: Scene) -> str:
    """Send each form into a new window."""
    return forms(scene).replace('target="frame', 'target="window')


def by_get(scene: Scene, act: Act) -> str:
    """Lead this window to a route, with everything that its form would say in the address."""
    said = Act(act.route, act.path, {"_method": "POST", **act.fields})
    written = form(scene, said, 0).replace('method="post" target="frame0"', 'method="get"')
    return f"<!doctype html>{written}{SEND_ALL}"


def from_a_sandbox(scene: Scene) -> str:
    """Send forms from a frame that has no origin."""
    scene.site.pages["/inside"] = forms(scene)
    return '<!doctype html><iframe sandbox="allow-forms allow-scripts" src="/inside"></iframe>'


def from_a_data_address(scene: Scene) -> str:
    """Send forms from a page that lies in its own address."""
    inside = json.dumps(forms(scene)).replace("</", "<\\/")
    return f"""<!doctype html><iframe></iframe><script>
    document.querySelector("iframe").src = "data:text/html," + encodeURIComponent({inside});
    </script>"""


def by_a_redirect(scene: Scene) -> str:
    """Send forms to the other site, which sends them on."""
    written = []
    for number, act in enumerate(scene.acts):
        scene.site.moved[f"/moved/{number}"] = f"{scene.base}{act.path}"
        written.append(form(scene, act, number, action=f"/moved/{number}"))
    return f"<!doctype html>{''.join(written)}{SEND_ALL}"


def with_a_stolen_token(scene: Scene) -> str:
    """Use tokens of forms that another admin has open."""
    with scene.premises.client() as client:
        scene.premises.log_in(client, scene.premises.admin_key("a third"))
        for number, act in enumerate(scene.acts):
            token = form_token(client.get("/admin/accounts").text)
            stolen = {**act.fields, "form_token": token}
            scene.acts[number] = Act(act.route, act.path, stolen)
        client.post("/admin/logout")
    scene.forget()
    return forms(scene)


def by_fetch(scene: Scene) -> str:
    """Send what a form would, by a script."""
    options = '{method: "POST", mode: "no-cors", credentials: "include", body}'
    return script(scene, f"fetch(address, {options}).catch(() => null);")


def by_beacon(scene: Scene) -> str:
    """Send what a form would, as a page that is left may."""
    return script(scene, "navigator.sendBeacon(address, body);")


def by_ping(scene: Scene) -> str:
    """Send what a browser tells of a link that was followed."""
    code = """
      const link = document.createElement("a");
      link.href = "#"; link.ping = address;
      document.documentElement.append(link);
      link.click();
    """
    return script(scene, code)


# Name, how far away the site is, the page, whether the browser sends the session's cookie.
FORMS: Final = {
    "a form in a frame, of another site": (CROSS, in_a_frame, False),
    "a form in a frame, of another port": (SAME, in_a_frame, True),
    "a form without a referrer": (SAME, without_a_referrer, True),
    "a form as plain text": (SAME, as_plain_text, True),
    "a form as multipart": (SAME, as_multipart, True),
    "a form into new windows, of another site": (CROSS, into_new_windows, False),
    "a form into new windows, of another port": (SAME, into_new_windows, True),
    "a form from a sandbox": (SAME, from_a_sandbox, False),
    "a form from a data address": (SAME, from_a_data_address, False),
    "a form that is redirected, of another site": (CROSS, by_a_redirect, False),
    "a form that is redirected, of another port": (SAME, by_a_redirect, True),
    "a form with the token of another session": (SAME, with_a_stolen_token, True),
    "a script that fetches, of another site": (CROSS, by_fetch, False),
    "a script that fetches, of another port": (SAME, by_fetch, True),
    "a beacon, of another site": (CROSS, by_beacon, False),
    "a beacon, of another port": (SAME, by_beacon, True),
    "a link that pings": (SAME, by_ping, True),
}
