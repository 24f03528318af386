"""The page of models: what each can do, the work that waits for it, who serves it."""

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from app.admin.access import operator_of
from app.admin.overview_reads import ModelQueue, model_queues
from app.admin.pages import render
from app.admin.worker_reads import WorkerRow, list_workers
from app.catalog.deps import CatalogDep
from app.kit.db import Conn
from app.kit.deps import DatabaseDep, SettingsDep

router = APIRouter(dependencies=[Depends(operator_of)])


@router.get("/models")
def show_models(
    request: Request,
    *,
    database: DatabaseDep,
    catalog: CatalogDep,
    settings: SettingsDep,
) -> HTMLResponse:
    """Show every model that this installation knows."""

    def read(conn: Conn) -> tuple[list[ModelQueue], list[WorkerRow]]:
        return model_queues(conn), list_workers(conn, gone_minutes=0)

    queues, workers = database.run(read)
    by_model = {queue.model: queue for queue in queues}
    known = {model.name for model in catalog.all()}
    rows: list[dict[str, Any]] = [
        {
            "model": model,
            "queue": by_model.get(model.name),
            "workers": [worker for worker in workers if worker.model == model.name],
        }
        for model in catalog.all()
    ]
    return render(
        request,
        "models.html",
        rows=rows,
        strangers=[queue for queue in queues if queue.model not in known],
        max_logprobs=settings.limits.logprobs,
    )
