"""`from`: which rows of which request."""

from functools import partial
from typing import Any
from uuid import UUID

import pytest

from app.completions.problems import RefusedError
from app.completions.rows_of import RowsOf, read_rows_of
from app.steering.spec import Site

JOB = "job_" + "0" * 31 + "7"
read = partial(read_rows_of, custom_id_chars=128)
GOOD: dict[str, Any] = {"job": JOB, "request_index": 3, "layer": 2, "positions": [5, 1]}


def test_every_field_arrives_and_positions_keep_their_order() -> None:
    found = read({**GOOD, "site": "z"}, None)
    assert found == RowsOf(UUID(int=7), 3, None, 2, Site.z, (5, 1))
    named = {"job": JOB, "custom_id": "a", "layer": 0, "request_index": None}
    assert read(named, (4,)) == RowsOf(UUID(int=7), None, "a", 0, Site.resid_post, (4,))


def test_its_own_positions_win_over_those_of_at() -> None:
    assert read(GOOD, (0, 1)).positions == (5, 1)


def test_equal_references_are_one_key() -> None:
    assert len({read(GOOD, None), read(dict(GOOD), (9,))}) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"job": None}, "no job"),
        ({"job": "job_7"}, "32 hexadecimal"),
        ({"job": 7}, "32 hexadecimal"),
        ({"request_index": None}, "neither request_index nor custom_id"),
        ({"custom_id": "a"}, "both request_index and custom_id"),
        ({"request_index": -1}, "request_index -1"),
        ({"request_index": True}, "request_index true"),
        ({"request_index": 2**31}, "whole number"),
        ({"request_index": None, "custom_id": ""}, "custom_id"),
        ({"request_index": None, "custom_id": "a\n"}, "printable"),
        ({"request_index": None, "custom_id": "a" * 129}, "1 to 128 printable"),
        ({"layer": None}, "layer null"),
        ({"layer": -1}, "layer -1"),
        ({"layer": 1.0}, "layer 1.0"),
        ({"site": "attn"}, "resid_post"),
        ({"site": ["z"]}, "one of"),
        ({"positions": []}, "empty list positions"),
        ({"positions": [1, 1]}, "position 1 more than once"),
        ({"positions": [-1]}, '"last"'),
        ({"positions": [True]}, "whole numbers"),
        ({"positions": 3}, "list of whole numbers"),
        ({"positions": [2**31]}, "no model reaches"),
        ({"positions": list(range(4097))}, "4097 positions"),
        ({"positions": None}, "no positions, and at has none"),
        ({"layers": [1]}, "'layers'. Did you mean 'layer'"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(RefusedError) as refusal:
        read({**GOOD, **change}, None)
    assert says in str(refusal.value)


@pytest.mark.parametrize("sent", [None, 3, "job", [GOOD], True])
def test_it_must_be_an_object(sent: object) -> None:
    with pytest.raises(RefusedError, match="must be an object"):
        read(sent, None)
