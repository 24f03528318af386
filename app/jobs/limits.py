"""GET /v1/limits: every cap of this server under its setting's name, and how much is in use."""

from fastapi import APIRouter, Request, Response

from app.accounts.access import CallerDep
from app.accounts.places import Places
from app.accounts.rate import Rate, RateLimits
from app.jobs.openapi import LIMITS
from app.kit.answers import json_answer
from app.kit.db import Conn
from app.kit.deps import DatabaseDep, SettingsDep
from app.settings import Limits

router = APIRouter(tags=["limits"])


@router.get("/v1/limits", **LIMITS)
def get_limits(
    request: Request, caller: CallerDep, database: DatabaseDep, settings: SettingsDep
) -> Response:
    """List the caps, and what account or key use of those that count something alive."""
    rates: RateLimits = request.app.state.rates
    places: Places = request.app.state.places

    def read(conn: Conn) -> dict[str, int]:
        row = conn.execute(
            """
            SELECT count(*) AS live FROM jobs
            WHERE account_id = %s AND state NOT IN ('completed', 'failed', 'cancelled', 'expired')
            """,
            (caller.account_id,),
        ).fetchone()
        return {"live_jobs": row["live"] if row else 0}

    in_use = database.run(read)
    in_use["completions_waiting_key"] = places.of(caller.key_id)
    in_use["completions_waiting_account"] = places.of_account(caller.account_id)
    for rate in Rate:
        if (standing := rates.look(rate, caller.key_id)) is not None:
            in_use[rate.value] = standing.limit - standing.remaining
    limits = [
        {
            "id": name,
            "value": getattr(settings.limits, name),
            "in_use": in_use.get(name),
            "description": field.description,
        }
        for name, field in Limits.model_fields.items()
    ]
    return json_answer({"object": "list", "data": limits, "has_more": False})
