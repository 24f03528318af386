"""Log lines are JSON, bounded, and without secrets."""

import io
import json
import logging

import pytest

from app.accounts.keys import mint_key
from app.kit.logs import LINE_CHARS_MAX, JsonFormatter, redact


@pytest.fixture
def logged():
    stream = io.StringIO()
    sink = logging.StreamHandler(stream)
    sink.setFormatter(JsonFormatter("api"))
    logger = logging.getLogger("tests.logs")
    logger.addHandler(sink)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield logger, lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(sink)
    logger.propagate = True


def test_a_line_says_when_who_and_what(logged):
    logger, lines = logged
    logger.info("job %s stored", "job_1", extra={"requests": 3})
    (line,) = lines()
    assert line["message"] == "job job_1 stored"
    assert (line["level"], line["process"], line["requests"]) == ("info", "api", 3)
    assert line["time"].endswith("Z")


def test_no_secret_reaches_a_line(logged):
    logger, lines = logged
    key = mint_key()
    logger.info("key %s", key, extra={"header": f"Bearer {key}", "url": "redis://:hunter2@h:1/0"})
    try:
        raise RuntimeError(f"postgresql://tiller:hunter2@db/tiller refused {key}")
    except RuntimeError:
        logger.exception("failed")
    written = json.dumps(lines())
    assert key not in written
    assert key[8:] not in written
    assert "hunter2" not in written
    assert "db/tiller refused" in written


def test_ids_stay_readable():
    for text in ("job_" + "0" * 32, "key_" + "a" * 32, "sv_" + "b" * 64, "req_" + "c" * 32):
        assert redact(text) == text


def test_a_huge_message_is_cut_and_stays_json(logged):
    logger, lines = logged
    logger.info("x" * (LINE_CHARS_MAX + 1))
    (line,) = lines()
    assert len(json.dumps(line)) <= LINE_CHARS_MAX
    assert "cut" in line
