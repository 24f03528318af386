"""The JSON reader agrees with the standard library on what is good, and refuses twins."""

import gc
import json
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidRequestError
from app.kit.json_body import (
    _NO_COLLECTION,
    LARGE,
    SLICE_BYTES,
    count_containers,
    read_object,
)

ANY = 2**30  # lists and objects
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
    assert read_object(body, depth_max=64, containers_max=ANY) == value


@given(TEXT, VALUES, VALUES)
def test_a_key_that_comes_twice_is_always_refused(key: str, first: object, second: object) -> None:
    name = json.dumps(key)
    body = f'{{"a": [{{{name}: {json.dumps(first)}, {name}: {json.dumps(second)}}}]}}'
    with pytest.raises(InvalidRequestError, match="twice"):
        read_object(body.encode(), depth_max=64, containers_max=ANY)


def test_colons_in_text_are_no_keys() -> None:
    body = rb'{"a:b": "x:y::z", "c": ["\u003a", "\u003A:"], "d": "\\u003a"}'
    assert read_object(body, depth_max=3, containers_max=ANY)["c"] == [":", "::"]


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
    assert read_object(sent, depth_max=depth, containers_max=ANY) == body
    with pytest.raises(InvalidRequestError, match=f"deeper than {depth - 1} levels"):
        read_object(sent, depth_max=depth - 1, containers_max=ANY)


def test_depth_is_counted_to_the_level() -> None:
    assert read_object(b'{"a":[[1]]}', depth_max=3, containers_max=ANY) == {"a": [[1]]}
    with pytest.raises(InvalidRequestError, match="2 levels"):
        read_object(b'{"a":[[1]]}', depth_max=2, containers_max=ANY)


def containers_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers_of, value.values()))
    return 1 + sum(map(containers_of, value)) if isinstance(value, list) else 0


BRACKETS = st.text(st.sampled_from('[]{}":,\\a'))


@given(
    value=st.dictionaries(
        BRACKETS,
        VALUES | st.recursive(BRACKETS, lambda i: st.lists(i) | st.dictionaries(BRACKETS, i)),
    )
)
def test_lists_and_objects_are_counted_and_brackets_in_texts_are_not(
    value: dict[str, object],
) -> None:
    count = containers_of(value)
    sent = json.dumps(value).encode()
    assert count_containers(sent) == count
    assert read_object(sent, depth_max=99, containers_max=count) == value
    with pytest.raises(
        InvalidRequestError, match=f"{count} lists and objects; at most {count - 1}"
    ):
        read_object(sent, depth_max=99, containers_max=count - 1)


def test_a_text_goes_on_from_one_slice_to_the_next() -> None:
    for beside in range(-2, 3):
        text = "[" * (SLICE_BYTES + beside)
        sent = json.dumps({"a": text, "b": [[], {}, text]}).encode()
        assert count_containers(sent) == 4


@pytest.mark.parametrize("unit", ["[]", "{}", "[0]", '{"a":0}', r'{"\u003aa":[]}'])
def test_too_many_containers_are_refused_before_anything_is_parsed(unit: str) -> None:
    sent = ('{"a":[' + ",".join([unit] * 1000)).encode()  # it does not even end
    with pytest.raises(InvalidRequestError, match="lists and objects; at most 999") as refused:
        read_object(sent, depth_max=9, containers_max=999)
    assert refused.value.code == "bad_json"
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        read_object(sent, depth_max=9, containers_max=3000)


def test_an_escaped_backslash_before_u0000_is_no_nul() -> None:
    assert read_object(rb'{"a":"\\u0000"}', depth_max=3, containers_max=ANY) == {"a": r"\u0000"}


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
