"""Every route of the dashboard, with the least role that may use it; a test finds the others."""

from typing import Final

from starlette.routing import Route

from app.admin.router import router

ANYBODY: Final = "anybody"
NEEDS: Final = {
    "GET /admin/": ANYBODY,
    "GET /admin": "read-only",
    "GET /admin/jobs": "read-only",
    "GET /admin/jobs/cancel": "operator",
    "POST /admin/jobs/cancel": "operator",
    "GET /admin/jobs/{job_id}": "read-only",
    "POST /admin/jobs/{job_id}/cancel": "operator",
    "GET /admin/jobs/{job_id}/files": "read-only",
    "GET /admin/jobs/{job_id}/files/{path:path}": "read-only",
    "GET /admin/jobs/{job_id}/requests": "read-only",
    "GET /admin/jobs/{job_id}/requests/{index}": "read-only",
    "GET /admin/jobs/{job_id}/samples": "read-only",
    "GET /admin/workers": "read-only",
    "POST /admin/workers/{worker_id}/drain": "operator",
    "POST /admin/workers/{worker_id}/undrain": "operator",
    "GET /admin/models": "read-only",
    "GET /admin/live": "read-only",
    "GET /admin/login": ANYBODY,
    "POST /admin/login": ANYBODY,
    "POST /admin/logout": "read-only",
    "GET /admin/static/{name:path}": ANYBODY,
    "GET /admin/accounts": "read-only",
    "POST /admin/accounts": "admin",
    "GET /admin/accounts/{account}": "read-only",
    "GET /admin/accounts/{account}/ledger": "read-only",
    "POST /admin/accounts/{account}/tokens/ask": "admin",
    "POST /admin/accounts/{account}/tokens": "admin",
    "POST /admin/accounts/{account}/keys": "admin",
    "POST /admin/accounts/{account}/keys/{key}/revoke": "admin",
    "POST /admin/accounts/{account}/holds/stop": "operator",
    "POST /admin/accounts/{account}/holds/allow": "admin",
    "GET /admin/audit": "read-only",
    "GET /admin/system": "read-only",
    "POST /admin/system/invariants": "operator",
}
# These answer for as long as somebody listens.
STREAMS: Final = frozenset({"GET /admin/live"})
SAMPLES: Final = {
    "{account}": "acct_" + "0" * 32,
    "{key}": "key_" + "0" * 32,
    "{job_id}": "job_" + "0" * 32,
    "{worker_id}": "worker_" + "0" * 32,
    "{name:path}": "style.css",
    "{path:path}": "results/part-0000000.1.parquet",
    "{index}": "0",
}


def routes() -> list[str]:
    """List method and path of every route of the dashboard."""
    return sorted(
        f"{method} {route.path}"
        for route in router.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    )


def address(route: str) -> tuple[str, str]:
    """Give the method of a route, and its path with ids of things that do not exist."""
    method, path = route.split(" ", 1)
    for name, value in SAMPLES.items():
        path = path.replace(name, value)
    assert "{" not in path, f"give {route} a sample in SAMPLES"
    return method, path
