"""What the query of any route may hold: no NUL, and no parameter that the route does not have.

A filter that is misspelt must not list everything, as if it had matched.
"""

from fastapi import Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute

from app.completions.problems import unknown_field
from app.errors import InvalidRequestError


async def refuse_odd_query(request: Request) -> None:
    """Refuse what no query may hold. Raises InvalidRequestError.

    Not in a thread: /healthz and the like must not wait for one.
    """
    sent = request.query_params.multi_items()
    for name, value in sent:
        if "\0" in name + value:  # no text in Postgres can hold it
            shown = name.replace("\0", "\\0")
            msg = f"{shown} holds the character U+0000, which is not allowed; leave it out."
            raise InvalidRequestError(msg, param=shown)
    if not sent or not request.url.path.startswith("/v1/"):
        return
    known = parameters_of(request.scope["route"])
    for name, _value in sent:
        if name not in known:
            msg = unknown_field(name, known, of="This route's query")
            raise InvalidRequestError(msg, param=name[:200])


def parameters_of(route: APIRoute) -> frozenset[str]:
    """Name the parameters of a route's query: declared ones, and those that it reads by itself."""
    declared = {each.alias for each in get_flat_dependant(route.dependant).query_params}
    extra = (route.openapi_extra or {}).get("parameters", [])
    return frozenset(declared | {each["name"] for each in extra if each["in"] == "query"})
