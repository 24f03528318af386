"""Structured logs: one JSON object a line on standard error, without secrets.

Every process calls `configure_logs` once, before anything else logs. Values given with `extra=`
become fields of the line, so messages stay constant and can be searched. `log_fields` adds fields
to every line that is written inside it (the id of an HTTP request, a Job's id), `stamp_logs` to
every line of the process. Prompts, request bodies and vectors are never logged; keys and
passwords that reach a line by accident are blanked.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

LINE_CHARS_MAX = 16_384

# What may carry a secret: an API key of ours or another service's, an Authorization header, the
# password inside a connection URL.
_SECRETS = (
    (
        re.compile(r"\b((?:sk|pk|hf|ghp)[_-](?:live_|test_|proj-)?)[A-Za-z0-9_\-]{16,}"),
        r"\1[redacted]",
    ),
    (re.compile(r"(?i)\b(bearer\s+)[^\s\"',]+"), r"\1[redacted]"),
    (re.compile(r"(\w://[^/\s:@\"']*:)[^@\s\"']+(@)"), r"\1[redacted]\2"),
)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_of_process: dict[str, str] = {}
_of_context: ContextVar[dict[str, str]] = ContextVar("log_fields", default={})  # noqa: B039 (never changed in place)


def configure_logs(process: str, *, level: int = logging.INFO) -> None:
    """Send every log record of this process to standard error as JSON lines."""
    sink = logging.StreamHandler(sys.stderr)
    sink.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [sink]
    root.setLevel(level)
    logging.captureWarnings(capture=True)
    for chatty in ("httpx", "alembic.runtime.migration", "celery", "kombu", "amqp"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def stamp_logs(**fields: str) -> None:
    """Add fields to every later line of this process, e.g. worker_id."""
    _of_process.update(fields)


@contextmanager
def log_fields(**fields: str) -> Iterator[None]:
    """Add fields to every line written inside, by this task and what it starts."""
    token = _of_context.set({**_of_context.get(), **fields})
    try:
        yield
    finally:
        _of_context.reset(token)


def redact(text: str) -> str:
    """Blank what looks like a key or a password."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: time, level, process, logger, message, extra fields."""

    def __init__(self, process: str) -> None:
        """Name the process in every line."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Write one line; values that JSON does not know are written as their text."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_of_process,
            **_of_context.get(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = redact(json.dumps(line, default=str, ensure_ascii=False))
        if len(text) <= LINE_CHARS_MAX:
            return text
        short = {key: line[key] for key in ("time", "level", "process", "logger")}
        cut = {**short, "message": record.getMessage()[:1000], "cut": text[1000:9000]}
        return redact(json.dumps(cut, ensure_ascii=False))
