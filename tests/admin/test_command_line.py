"""What `python -m app` does to accounts, tokens and keys is in the audit log, on its page too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import main
from tests.admin.people import Dashboard
from tests.fixtures.api import PEPPER

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command on the dashboard's database and reads what it prints."""
    settings = dashboard.app.state.settings
    for name in ("database_url", "redis_url", "object_store", "models_file"):
        monkeypatch.setenv(f"TILLER_{name.upper()}", str(getattr(settings, name)))
    monkeypatch.setenv("TILLER_KEY_PEPPER", PEPPER)

    def run_command(*words: str) -> dict[str, Any]:
        assert main(list(words)) == 0
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        return said

    return run_command


def acts(dashboard: Dashboard) -> list[tuple[str, str]]:
    """List acts of the command line and what was acted on, oldest first."""
    entries = [entry for entry in reversed(dashboard.audit()) if entry.name == "command line"]
    assert all(entry.role is entry.key_id is entry.session_id is None for entry in entries)
    return [(entry.action, entry.target) for entry in entries]


def test_an_account_its_grant_and_its_key_leave_a_row_each(dashboard: Dashboard, run: Run) -> None:
    made = run("create-account", "--name", "lab", "--grant", "1234")
    key = dashboard.number(
        "SELECT 'key_' || replace(api_keys.id::text, '-', '') FROM api_keys JOIN accounts"
        " ON accounts.id = account_id WHERE accounts.name = 'lab'"
    )
    assert acts(dashboard) == [
        ("account.create", made["account"]),
        ("tokens.grant", made["account"]),
        ("key.create", key),
    ]
    (granted,) = dashboard.audit("tokens.grant")
    assert granted.before == {"balance": 0, "held": 0}
    assert granted.after is not None
    assert granted.after["balance"] == granted.after["amount"] == 1234
    run("create-account", "--name", "without tokens")
    assert len(dashboard.audit("tokens.grant")) == 1


@pytest.mark.parametrize("role", ["read-only", "operator", "admin"])
def test_a_key_of_the_dashboard_leaves_a_row_with_its_role(
    dashboard: Dashboard, run: Run, role: str
) -> None:
    made = run("create-admin", "--name", "the night shift", "--role", role)
    assert acts(dashboard) == [("key.create", made["key"])], "the account was there"
    (entry,) = dashboard.audit("key.create")
    assert entry.after is not None
    assert (entry.after["name"], entry.after["role"]) == ("the night shift", role)
    assert entry.after["scopes"] == ["admin"]


@pytest.mark.parametrize(
    ("words", "role"),
    [((), None), (("--scope", "jobs:read"), None), (("--scope", "admin"), "admin")],
)
def test_a_key_of_an_account_leaves_a_row_and_its_secret_is_not_in_it(
    dashboard: Dashboard, run: Run, words: tuple[str, ...], role: str | None
) -> None:
    account = run("create-account", "--name", "lab")["account"]
    made = run("create-key", "--account", "lab", "--name", "second", *words)
    assert acts(dashboard)[-1] == ("key.create", made["key"])
    entry = dashboard.audit("key.create")[0]
    assert entry.after is not None
    assert (entry.after["account"], entry.after["role"]) == (account, role)
    assert entry.after["last4"] == made["api_key"][-4:]
    assert made["api_key"][:-4] not in json.dumps(entry.after)
    page = dashboard.browser("read-only").get("/admin/audit").text
    assert "Every act at the dashboard and of the command line." in page
    assert "<div>command line <" in page
    assert made["key"][:12] in page


Said = pytest.CaptureFixture[str]


@pytest.mark.parametrize("account", ["nobody", f"acct_{7:032x}"])
@pytest.mark.usefixtures("run")
def test_a_key_of_no_account_leaves_nothing(
    dashboard: Dashboard, capsys: Said, account: str
) -> None:
    assert main(["create-key", "--account", account, "--name", "x"]) == 1
    assert f"there is no account {account!r}" in capsys.readouterr().err
    assert acts(dashboard) == []


def test_an_account_is_not_made_twice(dashboard: Dashboard, run: Run, capsys: Said) -> None:
    made = run("create-account", "--name", "a lab", "--grant", "5")["account"]
    before = acts(dashboard)
    assert main(["create-account", "--name", "a lab", "--grant", "5"]) == 1
    said = capsys.readouterr().err
    assert made in said
    assert "create-key --account 'a lab'" in said
    assert acts(dashboard) == before
    assert dashboard.number("SELECT count(*) FROM accounts WHERE name = 'a lab'") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "x", "--scope", "foo"], "there are admin, completions, jobs:read"),
        (["--name", "x", "--grant", "-5"], "a whole number of tokens"),
        (["--name", "x", "--grant", "1e6"], "a whole number of tokens"),
        (["--name", " "], "1 to 200 characters"),
        (["--name", "x" * 201], "1 to 200 characters"),
    ],
)
@pytest.mark.usefixtures("run")
def test_what_makes_no_sense_is_refused_in_a_sentence(
    dashboard: Dashboard, capsys: Said, words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["create-account", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert acts(dashboard) == []


COMMANDS = [
    ["create-account", "--name", "x"],
    ["create-key", "--account", "x", "--name", "x"],
    ["create-admin", "--name", "x"],
    ["verify"],
    ["serve"],
    ["reconcile"],
    ["migrate"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_variable_that_is_missing_is_named_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: Said, words: list[str]
) -> None:
    for name in ("DATABASE_URL", "REDIS_URL", "OBJECT_STORE", "MODELS_FILE", "KEY_PEPPER"):
        monkeypatch.delenv(f"TILLER_{name}", raising=False)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "TILLER_DATABASE_URL" in said
    assert "not set" in said
    assert said.count("\n") == 1


def test_what_a_wrong_variable_holds_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setenv("TILLER_DATABASE_URL", "postgresql://nowhere/x")
    monkeypatch.setenv("TILLER_KEY_PEPPER", "short secret")
    assert main(["create-admin", "--name", "x"]) == 1
    said = capsys.readouterr().err
    assert "TILLER_KEY_PEPPER: " in said
    assert "16" in said
    assert "short secret" not in said


def test_a_folder_in_which_nothing_runs_is_named(tmp_path: Path, capsys: Said) -> None:
    for words in COMMANDS[:4]:
        assert main([*words, "--data-dir", str(tmp_path)]) == 1
        assert f"no service runs in {tmp_path}" in capsys.readouterr().err
