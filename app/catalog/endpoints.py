"""GET /v1/models: what is served, what each model can do, and how busy its queue is."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Response

from app.accounts.access import CallerDep
from app.catalog.deps import CatalogDep, NormsDep
from app.catalog.openapi import LIST_MODELS, READ_MODEL
from app.catalog.queue_state import IDLE, QueueState, queue_states
from app.catalog.served import ServedModel
from app.kit.answers import json_answer
from app.kit.deps import DatabaseDep, SettingsDep
from app.kit.pages import list_page
from app.settings import Limits

router = APIRouter(tags=["models"])


@router.get("/v1/models", **LIST_MODELS)
def get_models(
    caller: CallerDep,
    catalog: CatalogDep,
    database: DatabaseDep,
    settings: SettingsDep,
    norms: NormsDep,
) -> Response:
    """List the models that take Jobs and Completions."""
    del caller  # any key may look
    queues = database.run(queue_states)
    items = [
        model_object(model, settings.limits, queues.get(model.name, IDLE), norms.of(model))
        for model in catalog.listed()
    ]
    return json_answer(list_page(items, has_more=False))


@router.get("/v1/models/{name:path}", **READ_MODEL)
def get_model(
    name: str,
    caller: CallerDep,
    *,
    catalog: CatalogDep,
    database: DatabaseDep,
    settings: SettingsDep,
    norms: NormsDep,
) -> Response:
    """Describe one model."""
    del caller
    model = catalog.get(name)
    queues = database.run(queue_states)
    queue = queues.get(name, IDLE)
    return json_answer(model_object(model, settings.limits, queue, norms.of(model)))


def model_object(
    model: ServedModel, limits: Limits, queue: QueueState, norms: Sequence[float] | None
) -> dict[str, Any]:
    """Write a model as the API shows it; `norms` are the typical ones of its layers, if known."""
    return {
        "id": model.name,
        "object": "model",
        "created": int((model.path / "config.json").stat().st_mtime),
        "owned_by": "tiller",
        "revision": model.revision,
        "architecture": model.architecture,
        "capabilities": {
            "hidden_size": model.hidden_size,
            "n_layers": model.n_layers,
            "max_model_len": model.max_model_len,
            "max_logprobs": limits.logprobs,
            "dtype": model.dtype,
            "sites": model.describe_sites(),
            "vocab_size": model.vocab_size,
            "typical_norms": None if norms is None else [round(norm, 3) for norm in norms],
        },
        "queue": {
            "workers_ready": queue.workers_ready,
            "workers_starting": queue.workers_starting,
            "tokens_per_second": queue.tokens_per_second,
            "jobs_live": queue.jobs_live,
            "requests_pending": queue.requests_pending,
            "requests_running": queue.requests_running,
            "oldest_job_seconds": queue.oldest_job_seconds,
        },
    }
