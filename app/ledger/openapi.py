"""What the routes of usage and ledger answer, for the OpenAPI document."""

from typing import Any, Final

from app.kit.openapi import (
    COUNT,
    SECONDS,
    STRING,
    WHOLE,
    Schema,
    answer,
    closed,
    documented,
    items,
    nullable,
    page_of,
    page_queries,
    ref,
)

_SUMS: Final = ("available", "held", "balance", "granted", "charged", "released")
_COMPLETION_ID: Final[Schema] = {"type": "string", "pattern": "^cmpl-[0-9a-f]{32}$"}

SCHEMAS: Final[dict[str, Schema]] = {
    "LedgerEntry": closed(
        {
            "id": {"type": "string", "pattern": "^entry_[0-9]+$"},
            "object": {"const": "ledger.entry"},
            "kind": {
                "enum": ["grant", "reversal", "settle", "release"],
                "description": "settle charges a Hold and gives the rest of it back, release "
                "gives all of it back.",
            },
            "tokens": {
                **COUNT,
                "description": "What was granted, taken back, charged or released.",
            },
            "balance_change": {**WHOLE, "description": "The balance is the sum of these."},
            "tokens_held": {**nullable(COUNT), "description": "The Hold that it resolved."},
            "clipped": {**COUNT, "description": "Tokens used beyond the Hold: not charged."},
            "job_id": nullable(STRING),
            "request_index": nullable(COUNT),
            "completion_id": nullable(_COMPLETION_ID),
            "note": nullable(STRING),
            "created_at": SECONDS,
        }
    )
}

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
                    "completion_holds": {
                        **items(
                            closed(
                                {
                                    "completion_id": _COMPLETION_ID,
                                    "model": STRING,
                                    "status": {"enum": ["pending", "running"]},
                                    "tokens_held": COUNT,
                                    "created_at": SECONDS,
                                }
                            )
                        ),
                        "description": "Completions that have not ended, newest first.",
                    },
                }
            ),
        )
    }
)
LIST_ENTRIES: Final[dict[str, Any]] = documented(
    {200: answer("A page of entries.", page_of(ref("LedgerEntry")))},
    parameters=page_queries(newest=True),
)
