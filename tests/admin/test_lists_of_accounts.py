"""Lists of accounts, of their keys and of their open Holds: nothing is cut off without a word."""

import re

import pytest

from app.accounts.accounts import create_key
from app.admin import accounts, key_forms
from app.admin.account_reads import list_accounts
from app.kit.ids import public_id
from app.ledger.holds import stop_holds
from tests.admin.people import Dashboard
from tests.fixtures.api import PEPPER
from tests.fixtures.builders import Builders

KEYS = re.compile(r'title="(key_[0-9a-f]{32})"')


def next_page(text: str) -> str | None:
    found = re.search(r'href="([^"]+)" rel="next"', text)
    return None if found is None else found[1].replace("&amp;", "&")


def test_a_rare_name_is_looked_for_in_bounded_steps(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    wanted = builders.an_account(balance=0, name="the Wanted one")
    for number in range(12):
        builders.an_account(balance=0, name=f"other {number}")
    after, found, steps = None, [], 0
    with dashboard.database.transaction() as conn:
        while steps < 10:
            page = list_accounts(conn, name="wanted", after=after, scan_max=5)
            found += [row.id for row in page.rows]
            steps += 1
            assert (page.next is None) == (page.looked_back_to is None)
            if page.next is None:
                break
            after = page.next
    assert found == [wanted]
    assert steps == 3  # 13 of them and the operators' own


def test_a_search_that_has_not_come_to_the_end_says_how_far_it_came(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
):
    builders = Builders(dashboard.database)
    # Ids of one millisecond are in no order: that account must not be near the newest ones.
    for number in range(12):
        builders.an_account(balance=0, name=f"lab {number:02}")
    real = accounts.list_accounts
    monkeypatch.setattr(
        accounts, "list_accounts", lambda conn, **given: real(conn, **given, scan_max=2)
    )
    browser = dashboard.browser("read-only")
    text = browser.get("/admin/accounts?name=lab+00").text
    assert "None yet" in text
    assert "Looked back to" in text
    path = next_page(text)
    assert path is not None
    for _ in range(12):
        assert "name=lab+00" in path
        text = browser.get(path).text
        if (path := next_page(text)) is None or ">lab 00</a>" in text:
            break
    assert ">lab 00</a>" in text


def test_stopped_accounts_are_listed_alone_and_named_on_the_overview(dashboard: Dashboard):
    builders = Builders(dashboard.database)
    ids = [builders.an_account(name=f"lab {number}") for number in range(3)]
    browser = dashboard.browser("read-only")
    assert "No account is stopped" in browser.get("/admin/accounts?holds=stopped").text
    with dashboard.database.transaction() as conn:
        stop_holds(conn, ids[0], "The owner left.")
    text = browser.get("/admin").text
    assert "An account is stopped" in text
    assert "lab 0 gets no new Holds: The owner left." in text
    assert f'href="/admin/accounts/{public_id("acct", ids[0])}"' in text
    with dashboard.database.transaction() as conn:
        stop_holds(conn, ids[2], "Its ledger does not add up.")
    text = browser.get("/admin").text
    assert "2 accounts are stopped" in text
    assert 'href="/admin/accounts?holds=stopped"' in text
    assert re.search(r"lab [02], lab [02] get no new Holds", text)
    # Sorted: ids of one millisecond have no order.
    listed = re.findall(r">(lab \d)</a>", browser.get("/admin/accounts?holds=stopped").text)
    assert sorted(listed) == ["lab 0", "lab 2"]


def test_a_long_name_on_the_overview_says_that_it_goes_on(dashboard: Dashboard):
    account = Builders(dashboard.database).an_account(name="a" * 79 + " bcd")
    with dashboard.database.transaction() as conn:
        stop_holds(conn, account, "c" * 400)
    text = dashboard.browser("read-only").get("/admin").text
    assert f"{'a' * 79}… gets no new Holds: {'c' * 299}…" in text


def test_every_key_of_an_account_is_reached_page_by_page(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(key_forms, "KEYS_PAGE", 4)
    account = Builders(dashboard.database).an_account()
    with dashboard.database.transaction() as conn:
        made = [
            create_key(conn, account, PEPPER, name=f"key {number}", scopes={"jobs:read"})
            for number in range(9)
        ]
    browser = dashboard.browser("admin")
    path: str | None = f"/admin/accounts/{public_id('acct', account)}"
    seen: list[list[str]] = []
    while path is not None:
        text = browser.get(path).text
        seen.append(KEYS.findall(text))
        assert "of 9 keys" in text
        assert text.count("Revoke for good") == len(seen[-1])
        path = next_page(text)
    assert [len(page) for page in seen] == [4, 4, 1]
    assert [name for page in seen for name in page] == [
        public_id("key", key_id) for key_id in sorted((key.id for key in made), reverse=True)
    ]
    here = f"/admin/accounts/{public_id('acct', account)}"
    assert browser.get(f"{here}?keys_before=key_1").status_code == 400


def test_open_holds_that_are_not_shown_are_counted(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.admin.account_reads.SHOWN_MAX", 2)
    builders = Builders(dashboard.database)
    account = builders.an_account()
    path = f"/admin/accounts/{public_id('acct', account)}"
    for _ in range(2):
        builders.a_job(account_id=account, requests=1)
    browser = dashboard.browser("read-only")
    assert "the newest 2 of" not in browser.get(path).text
    for _ in range(3):
        builders.a_job(account_id=account, requests=1)
    assert re.search(r"the newest 2 of <a [^>]*>5 Jobs</a>", browser.get(path).text)
