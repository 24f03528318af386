"""The audit log is whole and final; the system page hides secrets and runs the invariants."""

import json
import re

import psycopg
import pytest

from app.admin.access import Operator
from app.admin.audit import record
from app.admin.system_reads import newest_revision, shown_settings
from app.jobs import audit_runs
from app.jobs.audit_runs import claim_run, last_runs, note_run, run_rules, snapshot, started_at
from app.kit import migrate
from app.kit.ids import new_uuid, public_id
from app.ledger.invariants import Invariant
from app.reconcile.steps import audit
from tests.admin.people import Dashboard
from tests.fixtures.api import PEPPER
from tests.fixtures.builders import Builders

OPERATOR = Operator(new_uuid(), new_uuid(), "olga", "operator")


@pytest.mark.parametrize(
    "change", ["UPDATE audit_log SET name = 'x'", "DELETE FROM audit_log", "TRUNCATE audit_log"]
)
def test_rows_of_the_audit_log_are_never_changed(dashboard: Dashboard, change: str):
    dashboard.browser("admin")
    with pytest.raises(psycopg.errors.RaiseException), dashboard.database.transaction() as conn:
        conn.execute(change)  # type: ignore[arg-type]
    assert len(dashboard.audit()) == 1


def test_the_audit_log_is_filtered_and_read_page_by_page(dashboard: Dashboard):
    with dashboard.database.transaction() as conn:
        for number in range(120):
            name = "worker.drain" if number % 2 else "job.cancel"
            record(conn, OPERATOR, name, f"job_{number % 3:032x}", after={"number": number})
    browser = dashboard.browser("read-only")

    def all_pages(path: str | None) -> list[int]:
        seen: list[int] = []
        while path is not None:
            page = browser.get(path).text
            seen += [int(found) for found in re.findall(r"<ins>(\d+)</ins>", page)]
            older = re.search(r'href="([^"]*before=\d+)"', page)
            path = None if older is None else older[1].replace("&amp;", "&")
        return seen

    assert all_pages("/admin/audit") == list(reversed(range(120)))
    assert all_pages("/admin/audit?action=job.cancel") == list(reversed(range(0, 120, 2)))
    assert all_pages(f"/admin/audit?target=job_{1:032x}") == list(reversed(range(1, 120, 3)))
    assert len(all_pages(f"/admin/audit?key={public_id('key', OPERATOR.key_id)}")) == 120
    assert all_pages(f"/admin/audit?key={public_id('key', new_uuid())}") == []
    assert all_pages("/admin/audit?key=nonsense") == []


def test_an_entry_shows_what_was_before_and_after(dashboard: Dashboard):
    with dashboard.database.transaction() as conn:
        record(
            conn,
            OPERATOR,
            "tokens.grant",
            public_id("acct", new_uuid()),
            before={"balance": 1000, "name": "<b>"},
            after={"balance": 3500, "name": "<b>", "note": "why"},
        )
    page = dashboard.browser("read-only").get("/admin/audit?action=tokens.grant").text
    assert "<del>1,000</del> → <ins>3,500</ins>" in page
    assert "name</span> &lt;b&gt;</li>" in page
    assert "<ins>why</ins>" in page


def test_the_filter_of_a_bulk_cancel_is_not_shown_as_a_change(dashboard: Dashboard):
    after = {"jobs": 3, "requests": 6, "more": False}
    with dashboard.database.transaction() as conn:
        record(conn, OPERATOR, "jobs.cancel", "", before={"model": "tiny-9"}, after=after)
        record(conn, OPERATOR, "job.cancel", "", before={"note": "went away"}, after={"jobs": 1})
    page = dashboard.browser("read-only").get("/admin/audit").text
    assert "model</span> tiny-9</li>" in page
    assert "jobs</span> <ins>3</ins></li>" in page
    assert "note</span> <del>went away</del> → <ins>none</ins></li>" in page


def test_settings_are_shown_and_secrets_are_not(dashboard: Dashboard):
    settings = dashboard.app.state.settings
    page = dashboard.browser("read-only").get("/admin/system")
    assert page.status_code == 200
    assert PEPPER not in page.text
    for name in type(settings).model_fields:
        assert name == "limits" or f"<code>{name}</code>" in page.text
    for name in type(settings.limits).model_fields:
        assert f"<code>{name}</code>" in page.text
    secret = settings.model_copy(
        update={
            "database_url": "postgresql://tiller:hunter2@db/tiller?sslpassword=hunter3",
            "redis_url": "redis://:hunter4@cache:6379/0",
            "object_store": "s3://bucket/x?secret=hunter5",
        }
    )
    shown = json.dumps([setting.value for setting in shown_settings(secret)])
    assert "hunter" not in shown
    assert PEPPER not in shown
    assert "@db/tiller" in shown


def test_the_schema_that_the_page_asks_for_is_the_newest(dashboard: Dashboard):
    assert newest_revision() == migrate.newest_revision()
    page = dashboard.browser("read-only").get("/admin/system").text
    assert f"revision {newest_revision()}" in page
    assert "not the one this code needs" not in page


def test_the_invariants_are_checked_on_a_button_and_the_outcome_is_kept(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    builders.a_job()
    browser = dashboard.browser("operator")
    assert "Not checked yet" in browser.get("/admin/system").text
    answer = browser.post("/admin/system/invariants")
    assert answer.status_code == 303
    page = browser.get("/admin/system").text
    assert "all true" in page
    assert "by operator" in page
    (entry,) = dashboard.audit("invariants.run")
    assert entry.after is not None
    assert (entry.after["broken"], entry.after["unfinished"]) == (0, 0)
    assert entry.after["true"] > 20
    with dashboard.database.transaction() as conn:
        conn.execute("UPDATE accounts SET balance = balance + 1")
    browser.post("/admin/system/invariants")
    page = browser.get("/admin/system").text
    assert "2 rules broken" in page
    assert "balance 1000001, entries 1000000" in page


def test_the_invariants_are_checked_by_one_press_at_a_time(dashboard: Dashboard):
    browser = dashboard.browser("operator")
    with snapshot(dashboard.database, statement_seconds=5.0) as conn:
        assert claim_run(conn)
        refused = browser.post("/admin/system/invariants")
        assert refused.status_code == 409
        assert "are being checked now" in refused.text
    assert dashboard.audit("invariants.run") == []
    assert browser.post("/admin/system/invariants").status_code == 303
    assert len(dashboard.audit("invariants.run")) == 1


def test_workers_show_what_engine_they_run(dashboard: Dashboard):
    Builders(dashboard.database).a_worker(engine="engine 9.9 <b>")
    page = dashboard.browser("read-only").get("/admin/system").text
    assert "engine 9.9 &lt;b&gt;" in page


def test_the_hourly_audit_of_the_reconciler_is_shown(dashboard: Dashboard):
    assert audit(dashboard.database) == []
    page = dashboard.browser("read-only").get("/admin/system").text
    assert "by the reconciler" in page
    assert "all true" in page


def test_a_rule_that_takes_too_long_is_unfinished_and_the_others_are_checked(
    dashboard: Dashboard,
):
    slow = Invariant(
        "S1", "sleeping is quick", "SELECT pg_sleep(60)::text AS subject, '' AS detail"
    )
    broken = Invariant("S2", "nothing is one", "SELECT '1' AS subject, 'is one' AS detail")
    with snapshot(dashboard.database, statement_seconds=0.2) as conn:
        began_at, outcomes = started_at(conn), run_rules(conn, rules=[slow, broken])
        late = run_rules(conn, rules=[broken], seconds_max=0.0)
    assert [outcome.outcome for outcome in outcomes] == ["unfinished", "broken"]
    assert [outcome.outcome for outcome in late] == ["unfinished"]
    with dashboard.database.transaction() as conn:
        note_run(conn, began_at, outcomes, run_by="olga")
    page = dashboard.browser("read-only").get("/admin/system").text
    assert "1 rule broken" in page
    assert "unfinished" in page
    assert "<code>1</code> is one" in page


def test_only_the_newest_runs_are_kept(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_runs, "RUNS_KEPT", 3)
    with dashboard.database.transaction() as conn:
        for _ in range(5):
            note_run(conn, started_at(conn), [], run_by="olga")
        assert len(last_runs(conn, limit=10)) == 3
