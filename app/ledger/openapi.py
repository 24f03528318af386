"""What GET /v1/usage answers, for the OpenAPI document."""

from typing import Any, Final

from app.kit.openapi import COUNT, STRING, answer, closed, documented, items

_SUMS: Final = ("available", "held", "balance", "granted", "charged", "released")

READ_USAGE: Final[dict[str, Any]] = documented(
    {
        200: answer(
            "The account's tokens.",
            closed(
                {
                    "object": {"const": "usage"},
                    "account_id": STRING,
                    **dict.fromkeys(_SUMS, COUNT),
                    "holds": items(
                        closed({"job_id": STRING, "requests": COUNT, "tokens_held": COUNT})
                    ),
                }
            ),
        )
    }
)
