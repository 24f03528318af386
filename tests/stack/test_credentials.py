"""Keys survive restarts, fit the database they are used with, and are nobody else's to read."""

import json
import stat

from app.accounts.accounts import find_account, list_keys
from app.accounts.keys import find_key, key_digest
from app.stack.credentials import (
    ACCOUNT_NAME,
    GRANT_TOKENS,
    Keys,
    load_keys,
    load_pepper,
    write_credentials,
)

PEPPER = "a pepper for tests"


def test_the_first_start_makes_an_account_with_a_grant_and_two_keys(database, tmp_path):
    keys = database.run(lambda conn: load_keys(conn, tmp_path, PEPPER))
    with database.transaction() as conn:
        account = find_account(conn, ACCOUNT_NAME)
        row = conn.execute("SELECT balance, held FROM accounts WHERE id = %s", [account]).fetchone()
        user = find_key(conn, key_digest(keys.api_key, PEPPER))
        admin = find_key(conn, key_digest(keys.admin_key, PEPPER))
    assert row == {"balance": GRANT_TOKENS, "held": 0}
    assert user.account_id == admin.account_id == account
    assert user.scopes == {"completions", "jobs:read", "jobs:write", "vectors"}
    assert admin.scopes == user.scopes | {"admin"}


def test_later_starts_hand_out_the_same_keys(database, tmp_path):
    first = database.run(lambda conn: load_keys(conn, tmp_path, PEPPER))
    second = database.run(lambda conn: load_keys(conn, tmp_path, PEPPER))
    assert first == second
    with database.transaction() as conn:
        account = find_account(conn, ACCOUNT_NAME)
        assert len(list_keys(conn, account)) == 2


def test_keys_that_the_database_does_not_know_are_made_anew_without_a_second_grant(
    database, tmp_path
):
    first = database.run(lambda conn: load_keys(conn, tmp_path, PEPPER))
    second = database.run(lambda conn: load_keys(conn, tmp_path, PEPPER + "!"))
    assert first.api_key != second.api_key
    with database.transaction() as conn:
        rows = conn.execute("SELECT balance FROM accounts").fetchall()
    assert rows == [{"balance": GRANT_TOKENS}]


def test_secrets_are_readable_by_their_owner_alone(tmp_path):
    assert load_pepper(tmp_path) == load_pepper(tmp_path)
    assert len(load_pepper(tmp_path)) >= 16
    file = write_credentials(tmp_path, Keys("a", "b"), address="http://127.0.0.1:8400")
    assert json.loads(file.read_text()) == {
        "api_base": "http://127.0.0.1:8400/v1",
        "api_key": "a",
        "admin_key": "b",
        "dashboard_url": "http://127.0.0.1:8400/admin",
    }
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
