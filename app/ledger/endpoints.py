"""GET /v1/usage: what the account of the key has, holds and was charged. GET /v1/ledger: why."""

from typing import Any

from fastapi import APIRouter, Request, Response

from app.accounts.access import CallerDep
from app.kit.answers import json_answer
from app.kit.db import Conn
from app.kit.deps import DatabaseDep, SettingsDep
from app.kit.ids import public_id
from app.kit.pages import list_page, page_query, unknown_cursor
from app.ledger.listing import entry_object, list_entries
from app.ledger.openapi import LIST_ENTRIES, READ_USAGE
from app.ledger.usage import account_usage, open_completion_holds, open_holds

router = APIRouter(tags=["usage"])

HOLDS_SHOWN_MAX = 100


@router.get("/v1/usage", **READ_USAGE)
def get_usage(caller: CallerDep, database: DatabaseDep) -> Response:
    """Say how many tokens there are: granted - charged = balance = available + held."""

    def read(conn: Conn) -> dict[str, Any]:
        usage = account_usage(conn, caller.account_id)
        holds = open_holds(conn, caller.account_id, limit=HOLDS_SHOWN_MAX)
        single = open_completion_holds(conn, caller.account_id, limit=HOLDS_SHOWN_MAX)
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
            "completion_holds": [
                {
                    "completion_id": f"cmpl-{item.completion_id.hex}",
                    "model": item.model,
                    "status": item.state,
                    "tokens_held": item.tokens_held,
                    "created_at": int(item.created_at.timestamp()),
                }
                for item in single
            ],
        }

    return json_answer(database.run(read))


@router.get("/v1/ledger", **LIST_ENTRIES)
def get_entries(
    request: Request, caller: CallerDep, database: DatabaseDep, settings: SettingsDep
) -> Response:
    """List the entries of the account, newest first: grants, charges and releases."""
    query = request.query_params
    page = page_query(query, limit_max=settings.limits.list_page)
    entries = database.run(lambda conn: list_entries(conn, caller.account_id, page))
    if entries is None:
        raise unknown_cursor(query["after"])
    items = [entry_object(entry) for entry in entries[: page.limit]]
    return json_answer(list_page(items, has_more=len(entries) > page.limit))
