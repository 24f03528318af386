"""The page of models: what each can do, the work that waits for it, who serves it."""

from typing import Any, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from app.admin.access import operator_of
from app.admin.followed import Followed, live_at
from app.admin.overview_reads import model_queues
from app.admin.pages import render
from app.catalog import Catalog
from app.catalog.deps import CatalogDep
from app.kit.db import Conn
from app.kit.deps import DatabaseDep, SettingsDep
from app.settings import Settings

router = APIRouter(dependencies=[Depends(operator_of)])

PIECES: Final = {"models": "_model_list.html"}


@router.get("/models")
def show_models(
    request: Request,
    *,
    database: DatabaseDep,
    catalog: CatalogDep,
    settings: SettingsDep,
) -> HTMLResponse:
    """Show every model that this installation knows."""
    context = database.read(lambda conn: _read(conn, catalog, settings))
    return render(request, "models.html", **context, **live_at("models"))


def followed(request: Request) -> Followed:
    """Say how the page of models is followed."""
    state = request.app.state
    return Followed(
        key="models", read=lambda conn: _read(conn, state.catalog, state.settings), pieces=PIECES
    )


def _read(conn: Conn, catalog: Catalog, settings: Settings) -> dict[str, Any]:
    queues = model_queues(conn)
    by_model = {queue.model: queue for queue in queues}
    models = catalog.all()
    known = {model.name for model in models}
    return {
        "rows": [{"model": model, "queue": by_model.get(model.name)} for model in models],
        "strangers": [queue for queue in queues if queue.model not in known],
        "max_logprobs": settings.limits.logprobs,
    }
