"""Files beside the pages (style, scripts, pictures): read once, named by their content.

A page names a file with `static("style.css")`, which adds the first digits of its SHA-256; under
that name a browser may keep it for a year, since other content gets another name.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response

from app.errors import NotFoundError

router = APIRouter()

FOLDER = Path(__file__).parent / "static"
PREFIX: Final = "/admin/static/"
YEAR: Final = "public, max-age=31536000, immutable"
MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
    ".json": "application/json",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as it was when the process first needed one."""

    content: bytes
    digest: str
    media_type: str


@lru_cache(maxsize=1)
def static_files() -> dict[str, StaticFile]:
    """Read every file below the folder whose kind is known, by its relative name."""
    return {
        path.relative_to(FOLDER).as_posix(): StaticFile(
            content := path.read_bytes(),
            hashlib.sha256(content).hexdigest()[:20],
            MEDIA_TYPES[path.suffix],
        )
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file() and path.suffix in MEDIA_TYPES
    }


def static_url(name: str) -> str:
    """Write the address of a static file. Raises KeyError when there is none of that name."""
    return f"{PREFIX}{name}?v={static_files()[name].digest}"


@router.get("/static/{name:path}")
def get_static(name: str, request: Request) -> Response:
    """Answer with a file; 304 when the browser has it."""
    found = static_files().get(name)
    if found is None:
        msg = f"There is no file {name[:200]!r}."
        raise NotFoundError(msg)
    etag = f'"{found.digest}"'
    named = request.query_params.get("v") == found.digest
    headers = {"etag": etag, "cache-control": YEAR if named else "no-cache"}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
