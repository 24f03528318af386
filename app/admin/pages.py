"""Renders pages: one Jinja2 environment that escapes everything and forgives no missing name.

`render` gives a whole page, `partial` a piece for HTMX. What every template may use besides its own
context: operator (None before login), nav, theme, path, request_id, static().
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app.admin.filters import FILTERS
from app.admin.static_files import static_url
from app.kit.request_id import request_id_of

TEMPLATES = Path(__file__).parent / "templates"
THEMES: Final = ("light", "dark")
THEME_COOKIE: Final = "tiller_theme"
# What the menu lists: label and address.
NAV: Final = (
    ("Overview", "/admin"),
    ("Jobs", "/admin/jobs"),
    ("Workers", "/admin/workers"),
    ("Models", "/admin/models"),
    ("Accounts", "/admin/accounts"),
    ("Audit log", "/admin/audit"),
    ("System", "/admin/system"),
)


def render(request: Request, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """Answer with a whole page."""
    text = environment().get_template(template).render(_given(request), **context)
    return HTMLResponse(text, status)


def partial(request: Request, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """Answer with a piece of a page that HTMX swaps in.

    `template` is a template of its own, without `extends`; its names begin with an underscore.
    """
    return render(request, template, status=status, **context)


def fragment(request: Request, template: str, **context: Any) -> str:
    """Render a piece of a page to text (events of a stream carry such pieces)."""
    return environment().get_template(template).render(_given(request), **context)


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Build the one environment of all templates."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,  # an upgrade on disk must not meet the code that still runs
    )
    made.filters.update(FILTERS)
    made.globals["static"] = static_url
    return made


def _given(request: Request) -> dict[str, Any]:
    path = request.url.path
    theme = request.cookies.get(THEME_COOKIE)
    return {
        "operator": getattr(request.state, "operator", None),
        "nav": [
            {"label": label, "href": href, "current": _is_current(href, path)}
            for label, href in NAV
        ],
        "path": path,
        "theme": theme if theme in THEMES else "auto",
        "request_id": request_id_of(request.scope),
    }


def _is_current(href: str, path: str) -> bool:
    return path == href or (href != "/admin" and path.startswith(f"{href}/"))
