"""Who is calling: the key in the Authorization header becomes a Caller, or a clear 401.

An account is what a key says, for the whole of a request. Routes name the scope they need with
`require`; what belongs to another account does not exist for the caller (404, never 403).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from fastapi import Depends, Request

from app.accounts.keys import find_key, is_well_formed, key_digest
from app.errors import AuthenticationError, PermissionDeniedError
from app.kit.deps import DatabaseDep, SettingsDep
from app.kit.large_bodies import ACCOUNT


@dataclass(frozen=True, slots=True)
class Caller:
    """The account that calls, and what its key may do."""

    account_id: UUID
    key_id: UUID
    scopes: frozenset[str]


def caller(request: Request, settings: SettingsDep, database: DatabaseDep) -> Caller:
    """Find out who calls. Raises AuthenticationError."""
    key = _bearer(request.headers.getlist("authorization"))
    if not is_well_formed(key):
        msg = (
            "This is not a key of this server: a key is sk_live_ and 72 hexadecimal digits. Was it "
            "cut when it was copied?"
        )
        raise AuthenticationError(msg)
    digest = key_digest(key, settings.key_pepper.get_secret_value())
    # One attempt: while Postgres is away, the answer to try again must not take a minute.
    found = database.run(lambda conn: find_key(conn, digest), attempts=1)
    if found is None:
        msg = "This key is unknown here, revoked or expired. Ask your operator for a new one."
        raise AuthenticationError(msg)
    request.scope["state"][ACCOUNT] = found.account_id
    return Caller(found.account_id, found.id, found.scopes)


CallerDep = Annotated[Caller, Depends(caller)]


def require(scope: str) -> Callable[[Caller], Caller]:
    """Make a dependency that gives the Caller when its key has `scope`.

    The dependency raises PermissionDeniedError.
    """

    def allowed(caller: CallerDep) -> Caller:
        if scope not in caller.scopes:
            msg = (
                f"This key lacks the scope {scope!r}; it has {', '.join(sorted(caller.scopes))}. "
                "Use a key that has it."
            )
            raise PermissionDeniedError(msg)
        return caller

    return allowed


def _bearer(headers: list[str]) -> str:
    if not headers:
        msg = "No key was sent. Send the header 'Authorization: Bearer sk_live_…'."
        raise AuthenticationError(msg)
    if len(headers) > 1:
        msg = "Several Authorization headers were sent. Send one."
        raise AuthenticationError(msg)
    scheme, _, key = headers[0].strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        msg = "The Authorization header must be 'Bearer sk_live_…'."
        raise AuthenticationError(msg)
    return key.strip()
