"""Places of waiting Completions: so many for a key, for an account and in all."""

import pytest

from app.accounts.places import Places
from app.errors import TooManyRequestsError
from app.kit.ids import new_uuid


def test_a_key_gets_its_share_and_places_come_back():
    places = Places(total_max=3, account_max=4, key_max=2)
    mine, one, two = new_uuid(), new_uuid(), new_uuid()
    with places.taken(mine, one), places.taken(mine, one):
        assert places.of(one) == 2
        with pytest.raises(TooManyRequestsError, match="2 Completions of this key") as refused:
            places.take(mine, one)
        assert (refused.value.code, refused.value.status) == ("queue_full", 429)
        with (
            places.taken(mine, two),
            pytest.raises(TooManyRequestsError, match="3 Completions are waiting here"),
        ):
            places.take(mine, two)
    assert places.of(one) == places.of(two) == 0
    places.take(mine, one)
    assert places.of(one) == 1


def test_all_keys_of_an_account_together_leave_places_for_others():
    places = Places(total_max=4, account_max=2, key_max=2)
    mine, keys = new_uuid(), [new_uuid() for _ in range(3)]
    for key in keys[:2]:
        places.take(mine, key)
    with pytest.raises(TooManyRequestsError, match="2 Completions of this account") as refused:
        places.take(mine, keys[2])
    assert refused.value.code == "queue_full"
    assert places.of(keys[2]) == 0
    assert places.of_account(mine) == 2
    other = new_uuid()
    with places.taken(other, other), places.taken(other, other):
        assert places.of_account(other) == 2
    places.give_back(mine, keys[0])
    places.take(mine, keys[2])
    assert places.of_account(mine) == 2
