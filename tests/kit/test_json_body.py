"""The JSON reader agrees with the standard library on what is good, and refuses twins."""

import gc
import json
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidRequestError
from app.kit.json_body import _NO_COLLECTION, LARGE, read_object

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


@given(value=st.dictionaries(TEXT, VALUES), ensure_ascii=st.booleans())
def test_whatever_the_standard_library_writes_is_read(
    value: dict[str, object], *, ensure_ascii: bool
) -> None:
    body = json.dumps(value, ensure_ascii=ensure_ascii).encode()
    assert read_object(body, depth_max=64) == value


@given(TEXT, VALUES, VALUES)
def test_a_key_that_comes_twice_is_always_refused(key: str, first: object, second: object) -> None:
    name = json.dumps(key)
    body = f'{{"a": [{{{name}: {json.dumps(first)}, {name}: {json.dumps(second)}}}]}}'
    with pytest.raises(InvalidRequestError, match="twice"):
        read_object(body.encode(), depth_max=64)


def test_colons_in_text_are_no_keys() -> None:
    body = rb'{"a:b": "x:y::z", "c": ["\u003a", "\u003A:"], "d": "\\u003a"}'
    assert read_object(body, depth_max=3)["c"] == [":", "::"]


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(
    value=st.dictionaries(TEXT, VALUES),
    beside=st.sampled_from([0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE]),
)
def test_depth_is_that_of_the_deepest_value_however_many_stand_beside_it(
    value: dict[str, object], beside: int
) -> None:
    body = {"a": [*[0] * beside, value], "b": {str(i): i for i in range(beside)} | {"c": [value]}}
    depth, sent = depth_of(body), json.dumps(body).encode()
    assert read_object(sent, depth_max=depth) == body
    with pytest.raises(InvalidRequestError, match=f"deeper than {depth - 1} levels"):
        read_object(sent, depth_max=depth - 1)


def test_depth_is_counted_to_the_level() -> None:
    assert read_object(b'{"a":[[1]]}', depth_max=3) == {"a": [[1]]}
    with pytest.raises(InvalidRequestError, match="2 levels"):
        read_object(b'{"a":[[1]]}', depth_max=2)


def test_an_escaped_backslash_before_u0000_is_no_nul() -> None:
    assert read_object(rb'{"a":"\\u0000"}', depth_max=3) == {"a": r"\u0000"}


@pytest.mark.parametrize("was_enabled", [True, False])
def test_bodies_that_are_read_at_the_same_time_leave_the_collector_as_it_was(was_enabled):
    first, second, third = ExitStack(), ExitStack(), ExitStack()
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        first.enter_context(_NO_COLLECTION)
        second.enter_context(_NO_COLLECTION)
        first.close()
        third.enter_context(_NO_COLLECTION)
        second.close()
        assert not gc.isenabled()
        third.close()
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if before else gc.disable)()
