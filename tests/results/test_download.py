"""Range, If-Range and If-None-Match, case by case."""

import pytest

from app.results.download import ByteRange, UnsatisfiableRangeError, chosen_range, is_unchanged

ETAG = '"abc"'


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=0-99", 0, 100),
        ("bytes=10-", 10, 100),
        ("bytes=-1", 99, 100),
        ("bytes=-500", 0, 100),
        ("bytes=90-500", 90, 100),
        (" bytes=5 - 6 ", 5, 7),
    ],
)
def test_a_single_range_is_served(header: str, start: int, end: int) -> None:
    assert chosen_range(header, None, etag=ETAG, size=100) == ByteRange(start, end, partial=True)


@pytest.mark.parametrize(
    "header",
    [None, "", "bytes", "bytes=", "bytes=-", "bytes=5-4", "bytes=a-b", "items=0-1", "bytes=0-1,5-6",
     "bytes=--5", "bytes=1e3-", "bytes=" + "9" * 40 + "-", "bytes=٣-٤"],
)  # fmt: skip
def test_what_is_no_single_range_gets_the_whole_file(header: str | None) -> None:
    assert chosen_range(header, None, etag=ETAG, size=100) == ByteRange(0, 100, partial=False)


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0", f"bytes={10**17}-"])
def test_a_range_outside_the_file_is_refused(header: str) -> None:
    with pytest.raises(UnsatisfiableRangeError):
        chosen_range(header, None, etag=ETAG, size=100)


def test_an_empty_file_has_no_range() -> None:
    with pytest.raises(UnsatisfiableRangeError):
        chosen_range("bytes=0-", None, etag=ETAG, size=0)
    with pytest.raises(UnsatisfiableRangeError):
        chosen_range("bytes=-5", None, etag=ETAG, size=0)


def test_if_range_with_another_etag_or_a_date_gets_the_whole_file() -> None:
    for if_range in ('"other"', 'W/"abc"', "Sun, 06 Nov 1994 08:49:37 GMT"):
        assert not chosen_range("bytes=0-1", if_range, etag=ETAG, size=9).partial
    assert chosen_range("bytes=0-1", ETAG, etag=ETAG, size=9).partial


def test_if_none_match_compares_weakly_and_knows_the_star() -> None:
    for header in (ETAG, 'W/"abc"', '"x", "abc"', "*"):
        assert is_unchanged(header, ETAG)
    for known in (None, "", '"x"', "abc"):
        assert not is_unchanged(known, ETAG)
