"""Bytes that no document describes: bodies that are no JSON, odd headers, methods and paths.

Whatever is sent, the answer is a refusal in the envelope and nothing has changed.
"""

import codecs
import gzip
import json
import os
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, event, example, given, settings
from hypothesis import strategies as st

from tests.openapi_fuzz.service import Service

BY_HAND = os.environ.get("TILLER_SCHEMATHESIS_EXAMPLES")
drawn = settings(
    max_examples=int(BY_HAND or 60),
    derandomize=not BY_HAND,
    database=None,
    deadline=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
# The API runs in a thread of this process and may draw while a strategy does.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
)

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "abc", "max_tokens": 1, "stop": ["z"]},
    "/v1/tokenize": {"model": "tiny", "prompt": "abc"},
    "/v1/jobs": {"model": "tiny", "requests": [{"prompt": "abc", "max_tokens": 1}]},
    "/v1/steering_vectors": {"activations": [1.0, 2.5], "name": "a"},
}
ROUTES = st.sampled_from(sorted(GOOD))
NUMBERS = ["1e999", "-1e999", "9" * 5000, "1" + "0" * 400, "NaN", "-Infinity", "1e-999", "0." * 2]
NUMBERS += ["01", "+1", ".5", "1.", "0x10", "1_000", "1e", "--1", "\u0661"]
DEPTHS = [33, 200, 1025, 100_000]
ENCODINGS = ["utf-16", "utf-32", "utf-16-be", "utf-8-sig", "cp037"]
BROKEN_TEXTS = [r"\ud800", r"\udc00\ud800", r"a\u0000b", r"\x41", "a\nb", "\0", r"\u12g4", "\\"]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a route, and a body that is not what it takes."""
    route = draw(ROUTES)
    good = json.dumps(GOOD[route])
    break_it = draw(st.sampled_from(BREAKS))
    event(break_it.__name__)
    return route, draw(break_it(good))


def _bytes(good: str) -> st.SearchStrategy[bytes]:
    del good
    return st.binary(max_size=200)


def _cut(good: str) -> st.SearchStrategy[bytes]:
    """Break a byte in the middle: one that no UTF-8 has."""
    places = st.integers(0, len(good) - 1)
    wrong = st.sampled_from([b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\x80", b"\xf4\x90\x80\x80"])
    return st.builds(lambda i, b: good[:i].encode() + b + good[i:].encode(), places, wrong)


def _twin(good: str) -> st.SearchStrategy[bytes]:
    """Write a key twice, the second time escaped or with another value."""
    key = next(iter(json.loads(good)))
    again = st.sampled_from([f'"{key}"', f'"\\u{ord(key[0]):04x}{key[1:]}"'])
    values = st.sampled_from(['"tiny"', "null", "1", "[]"])
    return st.builds(lambda k, v: f"{good[:-1]}, {k}: {v}}}".encode(), again, values)


def _number(good: str) -> st.SearchStrategy[bytes]:
    """Put a number that is none, or that no double holds, where a field is."""
    fields = st.sampled_from([*json.loads(good), "max_tokens", "seed", "user", "zzz"])
    return st.builds(
        lambda field, number: f'{{"{field}": {number}, {good[1:]}'.encode(),
        fields,
        st.sampled_from(NUMBERS),
    )


def _deep(good: str) -> st.SearchStrategy[bytes]:
    def nest(depth: int, opening: str, is_closed: bool) -> bytes:  # noqa: FBT001
        closing = {"[": "]", '{"a":': "}"}[opening] if is_closed else ""
        inner = opening * depth + ("1" if is_closed else "") + closing * depth
        return f'{good[:-1]}, "deep": {inner}}}'.encode()

    return st.builds(nest, st.sampled_from(DEPTHS), st.sampled_from(["[", '{"a":']), st.booleans())


def _text(good: str) -> st.SearchStrategy[bytes]:
    """Put text into a value or a key that no string of JSON or Postgres can be."""
    texts = st.sampled_from(BROKEN_TEXTS)
    forms = st.sampled_from(['"user": "{}"', '"{}": 1', '"a": ["{}"]', '"a": {{"{}": 1}}'])
    return st.builds(
        lambda form, text: f"{good[:-1]}, {form.format(text)}}}".encode("utf-8", "surrogatepass"),
        forms,
        texts,
    )


def _encoded(good: str) -> st.SearchStrategy[bytes]:
    whole = [good.encode(encoding) for encoding in ENCODINGS]
    whole += [
        gzip.compress(good.encode(), mtime=0),
        codecs.BOM_UTF8 + good.encode(),
        good.encode() * 2,
    ]
    return st.sampled_from(whole)


def _other(good: str) -> st.SearchStrategy[bytes]:
    """Send JSON that is no object, or something behind it."""
    del good
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    )
    return values.map(lambda value: json.dumps(value).encode())


BREAKS = [_bytes, _cut, _twin, _number, _deep, _text, _encoded, _other]


@pytest.fixture(scope="module")
def client(service: Service):
    with service.client() as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_changes(service: Service):
    """Everything that a user can change is as it was before."""

    def changed() -> list[dict[str, Any]]:
        return service.cluster.rows(
            """
            SELECT (SELECT count(*) FROM jobs) AS jobs, (SELECT count(*) FROM holds) AS holds,
                (SELECT count(*) FROM completions) AS completions,
                (SELECT count(*) FROM vectors) AS vectors, (SELECT count(*) FROM entries) AS entries
            """
        )

    before = changed()
    yield
    assert changed() == before


def refused(answer: httpx.Response) -> dict[str, Any]:
    """Assert that an answer is a refusal in the envelope; give its error."""
    assert 400 <= answer.status_code < 500, f"{answer.status_code} {answer.content[:300]!r}"
    if answer.request.method == "HEAD":
        return {}
    assert answer.headers["content-type"] == "application/json"
    content = answer.json()
    assert content.keys() == {"error", "request_id"}
    assert content["request_id"] == answer.headers["x-request-id"]
    assert {"message", "type", "param", "code"} <= content["error"].keys()
    assert isinstance(content["error"]["message"], str)
    found: dict[str, Any] = content["error"]
    return found


JSON_TYPES = ["application/json", "application/json; charset=utf-16", "APPLICATION/JSON", None]


@drawn
@given(sent=bodies(), content_type=st.sampled_from(JSON_TYPES))
def test_a_body_that_is_not_what_the_route_takes_is_refused(
    client: httpx.Client, sent: tuple[str, bytes], content_type: str | None
) -> None:
    route, body = sent
    headers = {} if content_type is None else {"content-type": content_type}
    refused(client.post(route, content=body, headers=headers))


TOKENS = st.text(st.characters(codec="latin-1", exclude_categories=["Cc", "Cs"]), max_size=60)
VALUES = TOKENS.map(lambda text: text.strip().encode("latin-1"))


@drawn
@given(route=ROUTES, value=VALUES, body=st.sampled_from([b"", b"{}", b"[", b"\xff\xfe", b"a=1"]))
@example(route="/v1/jobs", value=b"multipart/form-data", body=b"{}")
@example(route="/v1/steering_vectors", value=b"multipart/form-data", body=b"--\r\n")
@example(route="/v1/steering_vectors", value=b"multipart/form-data; boundary=", body=b"----\r\n")
@example(route="/v1/steering_vectors", value=b"multipart/form-data; boundary=\xe9", body=b"--\xe9")
@example(route="/v1/steering_vectors", value=b"application/x-npy", body=b"\x93NUMPY\x01\x00\xff")
@example(route="/v1/steering_vectors", value=b"application/octet-stream", body=b"\xff" * 9)
def test_any_content_type_over_a_body_that_is_none_is_refused(
    client: httpx.Client, route: str, value: bytes, body: bytes
) -> None:
    refused(client.post(route, content=body, headers=[(b"content-type", value)]))


@drawn
@given(route=ROUTES, name=st.sampled_from(["Idempotency-Key", "Content-Encoding"]), value=VALUES)
@example(route="/v1/jobs", name="Idempotency-Key", value=b"k" * 256)
@example(route="/v1/jobs", name="Idempotency-Key", value=b"\xff")
@example(route="/v1/completions", name="Content-Encoding", value=b"gzip, identity")
def test_odd_headers_beside_an_empty_body_are_refused(
    client: httpx.Client, route: str, name: str, value: bytes
) -> None:
    refused(client.post(route, content=b"", headers=[(name.encode(), value)]))


@drawn
@given(values=st.lists(VALUES, max_size=2), route=ROUTES)
@example(values=[b"Bearer"], route="/v1/jobs")
@example(values=[b"Bearer sk_live_" + b"0" * 72], route="/v1/jobs")
@example(values=[b"Bearer sk_live_\xe9"], route="/v1/completions")
@example(values=[b"Basic YTpi"], route="/v1/tokenize")
def test_whatever_is_sent_in_place_of_a_key_is_401(
    service: Service, values: list[bytes], route: str
) -> None:
    headers = [(b"authorization", value) for value in values]
    with httpx.Client(base_url=service.address, timeout=60) as stranger:
        answer = stranger.post(route, json=GOOD[route], headers=headers)
    assert answer.status_code == 401
    assert refused(answer)["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


METHODS = ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "HEAD", "PROPFIND", "MKCOL", "LOCK"]
SEGMENTS = st.lists(
    st.sampled_from(["v1", "jobs", "%00", "%ff", "..", ".", "%2e%2e", "%2F", "", "a" * 5000])
    | st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=8),
    min_size=1,
    max_size=5,
)


@drawn
@given(segments=SEGMENTS, method=st.sampled_from(["GET", "POST", *METHODS]))
def test_a_path_that_is_not_there_is_refused_whatever_the_method(
    client: httpx.Client, segments: list[str], method: str
) -> None:
    # The last segment keeps it from being a route by chance.
    path = "/" + "/".join([*segments, "zzz"])
    refused(
        client.request(method, httpx.URL(str(client.base_url)).copy_with(raw_path=path.encode()))
    )


@drawn
@given(route=ROUTES, method=st.sampled_from(METHODS), body=st.binary(max_size=20))
def test_a_method_that_a_route_does_not_take_is_405(
    client: httpx.Client, route: str, method: str, body: bytes
) -> None:
    answer = client.request(method, route, content=body)
    refused(answer)
    assert answer.status_code == 405
    assert "POST" in answer.headers["allow"]


RANGES = TOKENS | st.sampled_from(
    [
        *("bytes=", "bytes=-", "bytes=-0", "bytes=9-1", f"bytes=0-{'9' * 400}", "bytes=a-b"),
        *(
            "bytes=0-1,3-4",
            "BYTES=0-1",
            "bytes = 0 - 1",
            "bytes=\xb2-",
            "bytes=1-\xb3",
            "items=0-1",
        ),
    ]
)


@drawn
@given(name=st.sampled_from(["Range", "If-Range", "If-None-Match"]), value=RANGES)
def test_no_header_makes_a_file_answer_anything_but_itself_or_a_refusal(
    service: Service, client: httpx.Client, name: str, value: str
) -> None:
    path = f"/v1/jobs/{service.job_id}/files/{service.path}"
    headers = [(name.encode(), value.strip().encode("latin-1"))]
    if name == "If-Range":
        headers.append((b"range", b"bytes=0-1"))
    answer = client.get(path, headers=headers)
    if answer.status_code >= 400:
        assert refused(answer)["code"] == "range_not_satisfiable"
    else:
        assert answer.status_code in (200, 206, 304)
        assert len(answer.content) == int(answer.headers.get("content-length", 0))


QUERIES = {"limit", "after", "order", "status", "model", "interned", "wait", "custom_id"}


@drawn
@given(
    path=st.sampled_from(["/v1/jobs", "/v1/steering_vectors", "/v1/jobs/{job}/requests"]),
    name=st.sampled_from(sorted(QUERIES)),
    value=st.sampled_from(["%00", "%ff", "%ed%a0%80", "%", "%zz", "1%00", "a" * 20_000, "1.0"])
    | st.from_regex(r"[0-9a-z%&;=+]{0,12}", fullmatch=True),
)
def test_odd_queries_give_a_list_or_a_refusal(
    service: Service, client: httpx.Client, path: str, name: str, value: str
) -> None:
    raw = f"{path.format(job=service.job_id)}?{name}={value}"
    answer = client.get(httpx.URL(service.address).copy_with(raw_path=raw.encode()))
    if answer.status_code != 200:
        refused(answer)
    else:
        assert answer.json()["object"] == "list"
