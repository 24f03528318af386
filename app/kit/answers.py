"""Writes answers: JSON by orjson, and errors in their one envelope."""

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import Request, Response

from app.errors import ApiError
from app.kit.request_id import request_id_of


def json_answer(
    content: Any,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Answer with JSON."""
    return Response(
        orjson.dumps(content), status, dict(headers or {}), media_type="application/json"
    )


def error_answer(
    request: Request, error: ApiError, headers: Mapping[str, str] | None = None
) -> Response:
    """Answer with an error's envelope; retry-after is set when the error says so."""
    lines = dict(headers or {})
    if error.retry_after is not None:
        lines["retry-after"] = str(error.retry_after)
    if error.status == 401:
        lines["www-authenticate"] = "Bearer"
    content = error.envelope(request_id_of(request.scope))
    return json_answer(content, status=error.status, headers=lines)
