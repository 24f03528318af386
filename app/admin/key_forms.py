"""Keys of an account at the dashboard: create one, shown once, and revoke one.

A key that was created is in the answer to that one POST and nowhere else: a form that is sent
again tells so instead of making a second key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, get_args
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse, Response

from app.accounts.accounts import SCOPES, KeyRow, MintedKey, create_key, list_keys, revoke_key
from app.accounts.keys import Role
from app.admin.access import PATH, Operator, require_role
from app.admin.audit import record, was_recorded
from app.admin.forms import Form, FormDep
from app.admin.pages import render
from app.admin.sessions import end_sessions_of_key
from app.errors import ConflictError, InvalidRequestError, NotFoundError
from app.kit.db import Conn
from app.kit.deps import DatabaseDep, SettingsDep
from app.kit.ids import parse_id, public_id

router = APIRouter()
Admin = Annotated[Operator, Depends(require_role("admin"))]

KEYS_PAGE: Final = 50
DAYS_MAX: Final = 3650


@dataclass(frozen=True, slots=True)
class KeyPage:
    """Keys of an account, how many it has in all, and where the next page begins."""

    rows: Sequence[KeyRow]
    total: int
    next: UUID | None


@router.post("/accounts/{account}/keys")
def add_key(
    account: str,
    request: Request,
    operator: Admin,
    *,
    form: FormDep,
    database: DatabaseDep,
    settings: SettingsDep,
) -> Response:
    """Create a key and show it, once."""
    account_id, token = parse_id("acct", account), form.token()
    name, scopes, role = form.text("name"), _scopes(form), _role(form)
    days = form.number("days", 1, DAYS_MAX) if form.text("days", needed=False) else None
    pepper = settings.key_pepper.get_secret_value()

    def create(conn: Conn) -> tuple[str, MintedKey | None]:
        owner = conn.execute(
            """
            SELECT name, now() + make_interval(days => %s) AS expires_at FROM accounts
            WHERE id = %s FOR NO KEY UPDATE
            """,
            [days, account_id],
        ).fetchone()
        if owner is None or account_id is None:
            msg = f"There is no account {account[:80]!r}."
            raise NotFoundError(msg)
        if was_recorded(conn, token):
            return owner["name"], None
        made = create_key(
            conn,
            account_id,
            pepper,
            name=name,
            scopes=scopes,
            expires_at=owner["expires_at"],
            role=role if "admin" in scopes else None,
        )
        record(
            conn,
            operator,
            "key.create",
            public_id("key", made.id),
            after={
                "account": account,
                "name": name,
                "scopes": sorted(scopes),
                "role": role if "admin" in scopes else None,
                "days": days,
                "last4": made.secret[-4:],
            },
            token=token,
        )
        return owner["name"], made

    owner_name, made = database.run(create)
    return render(
        request,
        "key.html",
        account_name=owner_name,
        account_ref=account,
        name=name,
        scopes=sorted(scopes),
        secret=None if made is None else made.secret,
    )


@router.post("/accounts/{account}/keys/{key}/revoke")
def revoke(account: str, key: str, operator: Admin, database: DatabaseDep) -> Response:
    """Revoke a key at once, and end the sessions that it began."""
    account_id, key_id = parse_id("acct", account), parse_id("key", key)
    if key_id == operator.key_id:
        msg = "This is the key that you are logged in with; log in with another one to revoke it."
        raise ConflictError(msg)

    def act(conn: Conn) -> None:
        if account_id is None or key_id is None or not revoke_key(conn, account_id, key_id):
            msg = f"The account {account[:80]!r} has no key {key[:80]!r} that could be revoked."
            raise NotFoundError(msg)
        sessions = end_sessions_of_key(conn, key_id)
        record(
            conn,
            operator,
            "key.revoke",
            public_id("key", key_id),
            before={"revoked": False},
            after={"revoked": True, "account": account, "sessions_ended": sessions},
        )

    database.run(act)
    return RedirectResponse(f"{PATH}/accounts/{account}?said=revoked", 303)


def list_key_page(conn: Conn, account_id: UUID, before: UUID | None) -> KeyPage:
    """List keys of an account, newest first, those made before `before`."""
    rows = list_keys(conn, account_id, before=before, limit=KEYS_PAGE + 1)
    row = conn.execute(
        "SELECT count(*) AS keys FROM api_keys WHERE account_id = %s", [account_id]
    ).fetchone()
    assert row is not None
    more = len(rows) > KEYS_PAGE
    return KeyPage(rows[:KEYS_PAGE], row["keys"], rows[KEYS_PAGE - 1].id if more else None)


def key_id_of(text: str | None) -> UUID | None:
    """Read where a page of keys begins. Raises InvalidRequestError."""
    key_id = None if text is None else parse_id("key", text)
    if text is not None and key_id is None:
        msg = f"keys_before must be the id of a key, not {text[:50]!r}."
        raise InvalidRequestError(msg, param="keys_before")
    return key_id


def _scopes(form: Form) -> set[str]:
    scopes = set(form.values("scopes"))
    if not scopes or scopes - SCOPES:
        msg = f"Choose one scope at least, of {', '.join(sorted(SCOPES))}."
        raise InvalidRequestError(msg, param="scopes")
    return scopes


def _role(form: Form) -> Role:
    roles: tuple[Role, ...] = get_args(Role)
    sent = form.text("role", needed=False) or "read-only"
    for role in roles:
        if role == sent:
            return role
    msg = f"role must be one of {', '.join(roles)}, not {sent[:50]!r}."
    raise InvalidRequestError(msg, param="role")
