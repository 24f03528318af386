"""API keys: their form, their digest, and when they open the door."""

from datetime import UTC, datetime, timedelta

import pytest

from app.accounts.accounts import (
    create_account,
    create_key,
    find_account,
    list_keys,
    revoke_key,
)
from app.accounts.keys import find_key, is_well_formed, key_digest, mint_key
from app.kit.ids import new_uuid

PEPPER = "a pepper for tests only"


@pytest.fixture
def account(database):
    with database.transaction() as conn:
        return create_account(conn, "an account")


def test_a_minted_key_is_well_formed_and_every_change_of_it_is_not() -> None:
    key = mint_key()
    assert key.startswith("sk_live_")
    assert is_well_formed(key)
    assert mint_key() != key
    for position in range(8, len(key)):
        other = "0" if key[position] != "0" else "1"
        assert not is_well_formed(key[:position] + other + key[position + 1 :])
    for wrong in ("", "sk_live_", key[:-1], key + "0", key.upper(), "sk_test_" + key[8:]):
        assert not is_well_formed(wrong)


def test_a_key_is_found_by_its_digest_under_the_same_pepper_only(database, account) -> None:
    with database.transaction() as conn:
        minted = create_key(conn, account, PEPPER, name="laptop", scopes=["jobs:read"])
        found = find_key(conn, key_digest(minted.secret, PEPPER))
        assert found is not None
        assert (found.id, found.account_id) == (minted.id, account)
        assert found.scopes == {"jobs:read"}
        assert find_key(conn, key_digest(minted.secret, "another pepper")) is None
        assert find_key(conn, key_digest(mint_key(), PEPPER)) is None


def test_the_database_holds_nothing_that_opens_the_door(database, account) -> None:
    with database.transaction() as conn:
        secret = create_key(conn, account, PEPPER, name="laptop").secret
        row = conn.execute("SELECT api_keys::text AS text FROM api_keys").fetchone()
    assert secret[8:-4] not in row["text"]
    assert secret[-4:] in row["text"]


def test_a_revoked_key_opens_nothing_from_then_on(database, account) -> None:
    with database.transaction() as conn:
        minted = create_key(conn, account, PEPPER, name="laptop")
        assert not revoke_key(conn, new_uuid(), minted.id), "another account's"
        assert revoke_key(conn, account, minted.id)
        assert not revoke_key(conn, account, minted.id)
        assert find_key(conn, key_digest(minted.secret, PEPPER)) is None
        (row,) = list_keys(conn, account)
        assert row.revoked_at is not None


def test_an_expired_key_opens_nothing(database, account) -> None:
    with database.transaction() as conn:
        past, future = (datetime.now(tz=UTC) + timedelta(hours=h) for h in (-1, 1))
        old = create_key(conn, account, PEPPER, name="old", expires_at=past)
        new = create_key(conn, account, PEPPER, name="new", expires_at=future)
        assert find_key(conn, key_digest(old.secret, PEPPER)) is None
        assert find_key(conn, key_digest(new.secret, PEPPER)) is not None
        assert [row.name for row in list_keys(conn, account)] == ["new", "old"]


@pytest.mark.parametrize("scopes", [[], ["jobs:read", "everything"]])
def test_a_key_has_known_scopes(database, account, scopes) -> None:
    with pytest.raises(ValueError, match="scopes"), database.transaction() as conn:
        create_key(conn, account, PEPPER, name="laptop", scopes=scopes)


def test_accounts_are_found_by_name(database, account) -> None:
    with database.transaction() as conn:
        assert find_account(conn, "an account") == account
        assert find_account(conn, "nobody") is None
