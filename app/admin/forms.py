"""Reads forms: small, flat, URL-encoded; every value is text until a page has read it."""

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import parse_qsl
from uuid import UUID

from fastapi import Depends, Request

from app.errors import InvalidRequestError, RequestTooLargeError
from app.kit.deps import SettingsDep

FIELDS_MAX = 100
MEDIA_TYPE = "application/x-www-form-urlencoded"


class Form:
    """The fields of one form that was sent."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        """Keep the fields in the order in which they came."""
        self._pairs = pairs

    def text(self, name: str, *, chars_max: int = 200, needed: bool = True) -> str:
        """Give a field without the space around it; raises InvalidRequestError."""
        found = [value for field, value in self._pairs if field == name]
        if len(found) > 1:
            msg = f"{name} was sent {len(found)} times; send it once."
            raise InvalidRequestError(msg, param=name)
        value = found[0].strip() if found else ""
        if needed and not value:
            msg = f"{name} is empty; fill it in."
            raise InvalidRequestError(msg, param=name)
        if len(value) > chars_max:
            msg = f"{name} has {len(value)} characters; at most {chars_max} are allowed."
            raise InvalidRequestError(msg, param=name)
        return value

    def values(self, name: str) -> list[str]:
        """Give every value of a field that may be sent several times (checkboxes)."""
        return [value for field, value in self._pairs if field == name]

    def number(self, name: str, least: int, most: int) -> int:
        """Give a whole number; commas, spaces and underscores between digits are left out."""
        text = self.text(name, chars_max=40)
        digits = text.translate({ord(character): None for character in ", _\u00a0\u202f"})
        if digits.isascii() and digits.isdecimal() and least <= int(digits) <= most:
            return int(digits)
        msg = f"{name} must be a whole number from {least:,} to {most:,}, not {text!r}."
        raise InvalidRequestError(msg, param=name)

    def token(self) -> UUID:
        """Give the token of a form that counts once however often it is sent."""
        try:
            return UUID(self.text("form_token"))
        except ValueError:
            msg = "This form is damaged: its form_token is not one of ours. Load the page again."
            raise InvalidRequestError(msg, param="form_token") from None


async def form_of(request: Request, settings: SettingsDep) -> Form:
    """Read the form that was sent. Raises RequestTooLargeError, InvalidRequestError."""
    bytes_max = settings.admin_form_bytes
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            msg = f"The form has more than {bytes_max} bytes, which is the most allowed."
            raise RequestTooLargeError(msg)
    if body and kind != MEDIA_TYPE:
        msg = f"A form must be sent as {MEDIA_TYPE}, not as {kind[:100]!r}."
        raise InvalidRequestError(msg)
    try:
        pairs = parse_qsl(
            body.decode("utf-8"),
            keep_blank_values=True,
            max_num_fields=FIELDS_MAX,
            errors="strict",
        )
    except ValueError:
        msg = f"The form is not UTF-8, or it has more than {FIELDS_MAX} fields."
        raise InvalidRequestError(msg) from None
    _refuse_nul(dict(pairs))
    return Form(pairs)


def refuse_nul(request: Request) -> None:
    """Refuse U+0000 in path and query: no text in Postgres can hold it."""
    _refuse_nul({**request.query_params, "the path": request.url.path, **request.path_params})


def _refuse_nul(fields: Mapping[str, str]) -> None:
    for name, value in fields.items():
        if "\0" in f"{name}{value}":
            msg = "The character U+0000 is not allowed in " + name.replace("\0", "\\0")[:50] + "."
            raise InvalidRequestError(msg)


FormDep = Annotated[Form, Depends(form_of)]
