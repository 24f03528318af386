"""Places of waiting Completions: so many for a key, so many in all."""

import pytest

from app.accounts.places import Places
from app.errors import TooManyRequestsError
from app.kit.ids import new_uuid


def test_a_key_gets_its_share_and_places_come_back():
    places = Places(total_max=3, key_max=2)
    one, two = new_uuid(), new_uuid()
    with places.taken(one), places.taken(one):
        assert places.of(one) == 2
        with pytest.raises(TooManyRequestsError, match="2 Completions of this key") as refused:
            places.take(one)
        assert (refused.value.code, refused.value.status) == ("queue_full", 429)
        with places.taken(two), pytest.raises(TooManyRequestsError, match="waiting here"):
            places.take(two)
    assert places.of(one) == places.of(two) == 0
    places.take(one)
    assert places.of(one) == 1
