"""GET /v1/usage: what the account of the key has, holds and was charged."""

from typing import Any

from fastapi import APIRouter, Response

from app.accounts.access import CallerDep
from app.kit.answers import json_answer
from app.kit.db import Conn
from app.kit.deps import DatabaseDep
from app.kit.ids import public_id
from app.ledger.openapi import READ_USAGE
from app.ledger.usage import account_usage, open_holds

router = APIRouter(tags=["usage"])

HOLDS_SHOWN_MAX = 100


@router.get("/v1/usage", **READ_USAGE)
def get_usage(caller: CallerDep, database: DatabaseDep) -> Response:
    """Say how many tokens there are: granted - charged = balance = available + held."""

    def read(conn: Conn) -> dict[str, Any]:
        usage = account_usage(conn, caller.account_id)
        holds = open_holds(conn, caller.account_id, limit=HOLDS_SHOWN_MAX)
        return {
            "object": "usage",
            "account_id": public_id("acct", caller.account_id),
            "available": usage.available,
            "held": usage.held,
            "balance": usage.balance,
            "granted": usage.granted,
            "charged": usage.charged,
            "released": usage.released,
            "holds": [
                {
                    "job_id": public_id("job", item.job_id),
                    "requests": item.holds,
                    "tokens_held": item.tokens_held,
                }
                for item in holds
            ],
        }

    return json_answer(database.run(read))
