"""Who is at the dashboard: the session cookie becomes an Operator, or the way to the login page.

    read-only < operator < admin        each role may do what those before it may

Pages take `OperatorDep`; a page or act that needs more takes `require_role`. Nothing here
redirects or renders: the exceptions say what is missing, app/admin/dashboard.py answers them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, get_args
from urllib.parse import unquote
from uuid import UUID

from fastapi import Depends, Request

from app.accounts.keys import Role, key_digest
from app.admin.sessions import find_session
from app.errors import PermissionDeniedError
from app.kit.deps import DatabaseDep, SettingsDep

COOKIE: Final = "tiller_session"
PATH: Final = "/admin"
# Listed from the least to the most.
ROLES: Final[tuple[Role, ...]] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Operator:
    """A person with an admin key, and the session in which they act."""

    key_id: UUID
    session_id: UUID
    name: str
    role: Role

    def may(self, role: Role) -> bool:
        """Tell whether this operator may do what `role` may do (templates ask it too)."""
        return ROLES.index(self.role) >= ROLES.index(role)


class NotLoggedInError(Exception):
    """No session: the answer leads to the login page."""


def operator_of(request: Request, settings: SettingsDep, database: DatabaseDep) -> Operator:
    """Find out who is at the dashboard. Raises NotLoggedInError."""
    token = request.cookies.get(COOKIE, "")
    if not token:
        raise NotLoggedInError
    digest = key_digest(token, settings.key_pepper.get_secret_value())
    idle_seconds = settings.admin_idle_seconds
    # A live stream comes back by itself: a page that nobody looks at must not stay logged in.
    note_seen = request.url.path != f"{PATH}/live"
    found = database.run(
        lambda conn: find_session(conn, digest, idle_seconds=idle_seconds, note_seen=note_seen),
        attempts=1,
    )
    if found is None:
        raise NotLoggedInError
    operator = Operator(found.key_id, found.id, found.name, found.role)
    request.state.operator = operator
    return operator


OperatorDep = Annotated[Operator, Depends(operator_of)]
LOGGED_IN: Final = Depends(operator_of)  # for pages that anybody with a session may see


def require_role(role: Role) -> Callable[[Operator], Operator]:
    """Make a dependency that gives the Operator when theirs is `role` or more.

    The dependency raises NotLoggedInError, PermissionDeniedError.
    """

    def allowed(operator: OperatorDep) -> Operator:
        if not operator.may(role):
            msg = (
                f"This needs the role {role}; the key {operator.name!r} has the role "
                f"{operator.role}. Log in with another key, or ask somebody who has one."
            )
            raise PermissionDeniedError(msg, code="insufficient_role")
        return operator

    return allowed


def local_path(text: str | None) -> str:
    """Give the page to return to after login: a path of the dashboard, else its first page.

    Anything that a browser could read as another place (another host, a backslash, a control
    character) is left out.
    """
    if (
        text is None
        or len(text) > 2000
        or not (text == PATH or text.startswith((f"{PATH}/", f"{PATH}?")))
        or ".." in unquote(text)  # browsers take %2e for a dot
        or any(character <= " " or character in "\\\x7f" for character in text)
        or text.startswith((f"{PATH}/login", f"{PATH}/logout", f"{PATH}/static"))
    ):
        return PATH
    return text
