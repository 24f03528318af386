"""Puts the API together: middleware, routers, and the one place that turns errors into answers.

Everything a process needs is opened when it starts and kept in `app.state`: settings, database,
store, catalog, waker, desk, captured… Nothing is read or connected at import.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from app import health, metrics
from app.accounts.places import Places
from app.accounts.rate import RateHeadersMiddleware, RateLimits
from app.admin.dashboard import DashboardMiddleware, create_dashboard
from app.catalog import endpoints as catalog_endpoints
from app.catalog import load_catalog
from app.catalog import openapi as catalog_openapi
from app.catalog.norms import TypicalNorms
from app.completions import endpoints as completions_endpoints
from app.completions import openapi as completions_openapi
from app.completions import tokenize
from app.completions.waiting import Desk
from app.errors import (
    ApiError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    UnavailableError,
)
from app.jobs import endpoints as jobs_endpoints
from app.jobs import limits as limits_endpoints
from app.jobs import openapi as jobs_openapi
from app.kit.answers import error_answer
from app.kit.body_limit import BodyLimitMiddleware
from app.kit.db import Database, DatabaseUnavailableError
from app.kit.large_bodies import Line
from app.kit.openapi import FAILURES, describe, operation_id
from app.kit.request_id import RequestIdMiddleware
from app.kit.traffic import TrafficMiddleware
from app.ledger import endpoints as ledger_endpoints
from app.ledger import openapi as ledger_openapi
from app.query import refuse_odd_query
from app.queue import Waker
from app.results import endpoints as results_endpoints
from app.results import openapi as results_openapi
from app.results.captured import CapturedLimits, CapturedRows
from app.settings import Limits, Settings
from app.storage import StoreError, open_store
from app.vectors import endpoints as vectors_endpoints
from app.vectors import openapi as vectors_openapi

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 2
# Large bodies that are worked on at once; Completions have a turn that no Job can take.
LARGE_AT_ONCE = 2
LARGE_COMPLETIONS_AT_ONCE = 1
ROUTERS = (
    jobs_endpoints.router,
    results_endpoints.router,
    vectors_endpoints.router,
    completions_endpoints.router,
    tokenize.router,
    catalog_endpoints.router,
    ledger_endpoints.router,
    limits_endpoints.router,
    health.router,
    metrics.router,
)
# What the OpenAPI document calls things.
SCHEMAS = {
    **catalog_openapi.SCHEMAS,
    **completions_openapi.SCHEMAS,
    **jobs_openapi.SCHEMAS,
    **ledger_openapi.SCHEMAS,
    **results_openapi.SCHEMAS,
    **vectors_openapi.SCHEMAS,
}


def create_app(settings: Settings) -> FastAPI:
    """Build the API; it connects to its parts when the server starts it."""
    app = FastAPI(
        title="Tiller",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
        lifespan=_lifespan,
    )
    app.state.settings = settings
    health.prepare_readiness(app)
    for router in ROUTERS:
        app.include_router(router, dependencies=[Depends(refuse_odd_query)], responses=FAILURES)
    describe(app, SCHEMAS)
    # Added last is outermost: every answer has an id, a 413 too.
    app.add_middleware(
        BodyLimitMiddleware,
        bytes_max=settings.limits.body_bytes,
        line=_line(settings.limits, LARGE_AT_ONCE),
        lines_of={"/v1/completions": _line(settings.limits, LARGE_COMPLETIONS_AT_ONCE)},
    )
    app.add_middleware(RateHeadersMiddleware)
    app.add_middleware(DashboardMiddleware, dashboard=create_dashboard(app.state))
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(TrafficMiddleware, traffic=metrics.prepare_metrics(app))
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(DatabaseUnavailableError, _answer_database_away)
    app.add_exception_handler(psycopg.OperationalError, _answer_database_away)
    app.add_exception_handler(StoreError, _answer_store_away)
    return app


def _line(limits: Limits, at_once: int) -> Line:
    return Line(
        at_once=at_once, bytes_max=limits.large_bodies_bytes, seconds=limits.large_body_seconds
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    app.state.waiters = 0
    app.state.catalog = load_catalog(settings.models_file)
    app.state.store = open_store(
        settings.object_store,
        links=settings.download_links,
        link_endpoint=settings.download_endpoint,
    )
    app.state.waker = Waker(settings.redis_url)
    app.state.database = Database(settings.database_url, size_max=settings.database_connections)
    app.state.desk = Desk(
        app.state.database,
        settings.redis_url,
        waiting_max=settings.limits.completions_waiting,
    )
    app.state.rates = RateLimits(settings.redis_url, settings.limits)
    app.state.places = Places(
        total_max=settings.limits.completions_waiting,
        key_max=settings.limits.completions_waiting_key,
        account_max=settings.limits.completions_waiting_account,
    )
    app.state.norms = TypicalNorms(app.state.database)
    app.state.captured = CapturedRows(
        app.state.database, app.state.store, CapturedLimits.of_job(settings.limits)
    )
    app.state.captured_alone = CapturedRows(
        app.state.database, app.state.store, CapturedLimits.of_completion(settings.limits)
    )
    try:
        yield
    finally:
        await app.state.desk.close()
        app.state.rates.close()
        app.state.database.close()
        app.state.waker.close()


async def _answer_api_error(request: Request, error: Any) -> Response:
    assert isinstance(error, ApiError)
    return error_answer(request, error)


async def _answer_http_exception(request: Request, error: Any) -> Response:
    """Answer what the router itself refuses: an unknown path, a method that a path lacks."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    known: ApiError
    headers = dict(error.headers or {})
    if error.status_code == 405:
        # The router names the methods of the first route with this path only.
        headers = {"allow": ", ".join(_methods(request))}
        known = MethodNotAllowedError(f"There is no {where}; this path takes {headers['allow']}.")
    elif error.status_code == 404:
        known = NotFoundError(f"There is no {where}. GET /openapi.json lists all routes.")
    else:
        known = InvalidRequestError(str(error.detail))
    return error_answer(request, known, headers)


def _methods(request: Request) -> list[str]:
    matching = (
        route.methods or set()
        for route in request.app.routes
        if isinstance(route, Route) and route.path_regex.match(request.url.path)
    )
    return sorted(set().union(*matching))


async def _answer_validation_error(request: Request, error: Any) -> Response:
    """Answer a path or query parameter that FastAPI could not read."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return error_answer(request, InvalidRequestError(f"{name}: {first['msg']}.", param=name))


async def _answer_database_away(request: Request, error: Any) -> Response:
    log.warning("database away", extra={"error": repr(error), "path": request.url.path[:200]})
    msg = "The database cannot be reached at the moment. " + (
        "Send it again."
        if request.method in ("GET", "HEAD")
        else "What was asked for may have been done: look, or repeat it with its Idempotency-Key."
    )
    return error_answer(request, UnavailableError(msg, retry_after=RETRY_AFTER_SECONDS))


async def _answer_store_away(request: Request, error: Any) -> Response:
    log.warning("object store away", extra={"error": repr(error), "path": request.url.path[:200]})
    msg = "The object store, which keeps the files of Jobs, cannot be reached. Send it again."
    return error_answer(request, UnavailableError(msg, retry_after=RETRY_AFTER_SECONDS))
