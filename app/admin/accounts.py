"""The pages of accounts, and what an admin does there: create, keys, tokens, Holds.

Tokens move in two steps: the first shows what would happen, the second carries the token of its
form and counts once. Every act and its row in the audit log are one transaction; balances are
written by app/ledger/holds.py alone.
"""

from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode
from uuid import UUID, uuid4

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.accounts.accounts import create_account
from app.admin.access import LOGGED_IN, PATH, Operator, require_role
from app.admin.account_reads import (
    PAGE,
    AccountRow,
    list_accounts,
    list_entries,
    read_account,
    view_account,
)
from app.admin.audit import record, was_recorded
from app.admin.followed import Followed, live_at, stands_still
from app.admin.forms import Form, FormDep
from app.admin.key_forms import key_id_of, list_key_page
from app.admin.pages import render
from app.errors import ConflictError, InvalidRequestError, NotFoundError
from app.kit.db import Conn
from app.kit.deps import DatabaseDep
from app.kit.ids import parse_id, public_id
from app.ledger.holds import GRANT_MAX, allow_holds, grant_tokens, reverse_tokens, stop_holds

router = APIRouter()
ADMIN: Final = Depends(require_role("admin"))
Admin = Annotated[Operator, ADMIN]
Steward = Annotated[Operator, Depends(require_role("operator"))]

NOTE_CHARS_MAX: Final = 500
# What a page says after the act that led to it; the address carries the word alone.
SAID: Final = {
    "created": "The account was created. It has no tokens and no key yet.",
    "grant": "The tokens were granted.",
    "reversal": "The tokens were taken back.",
    "again": "This form was sent before; it counted once.",
    "revoked": "The key was revoked. It opens nothing any more, and its sessions are over.",
    "stopped": "The account places no new Holds until they are allowed again.",
    "allowed": "The account may place Holds again.",
}
Kind = Literal["grant", "reversal"]
LIST_PIECES: Final = {"accounts": "_account_list.html"}
PIECES: Final = {
    "stopped": "_account_stopped.html",
    "tokens": "_account_tokens.html",
    "holds": "_account_holds.html",
    "keys": "_account_keys.html",
    "stop": "_account_stop.html",
    "entries": "_account_entries.html",
}
LEDGER_PIECES: Final = {"ledger": "_ledger_list.html"}


@router.get("/accounts", dependencies=[LOGGED_IN])
def show_accounts(request: Request, database: DatabaseDep) -> HTMLResponse:
    """List accounts, newest first; `name` and `holds=stopped` filter, `after` pages."""
    name = request.query_params.get("name", "").strip()[:200]
    stopped = request.query_params.get("holds") == "stopped"
    after = request.query_params.get("after")
    cursor = None if after is None else account_id_of(after)
    if name or stopped:  # a search costs too much to do it every other second
        moves = stands_still(f"{PATH}/accounts", "the list of all accounts is live")
    elif after is not None:
        moves = stands_still(f"{PATH}/accounts")
    else:
        moves = live_at("accounts")
    context = database.read(lambda conn: _read_list(conn, name, stopped=stopped, after=cursor))
    return render(request, "accounts.html", **context, **moves, form_token=uuid4())


def followed_list(_request: Request) -> Followed:
    """Say how the first page of the list of accounts is followed."""
    return Followed(key="accounts", read=_read_list, pieces=LIST_PIECES)


def _read_list(
    conn: Conn, name: str = "", *, stopped: bool = False, after: UUID | None = None
) -> dict[str, Any]:
    page = list_accounts(conn, name=name or None, stopped=stopped, after=after)
    asked = {"name": name, "holds": "stopped" if stopped else ""}
    query = {field: value for field, value in asked.items() if value}
    here = f"{PATH}/accounts"
    older = None if page.next is None else {**query, "after": public_id("acct", page.next)}
    return {
        "page": page,
        "asked": asked,
        "older": None if older is None else f"{here}?{urlencode(older)}",
        "first": None if after is None else f"{here}?{urlencode(query)}",
    }


@router.post("/accounts")
def add_account(operator: Admin, form: FormDep, database: DatabaseDep) -> Response:
    """Create an account."""
    name, token = form.text("name"), form.token()

    def create(conn: Conn) -> UUID | None:
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 2))", [str(token)])
        if was_recorded(conn, token):
            return None
        account_id = create_account(conn, name)
        target = public_id("acct", account_id)
        record(conn, operator, "account.create", target, after={"name": name}, token=token)
        return account_id

    created = database.run(create)
    if created is None:
        return RedirectResponse(f"{PATH}/accounts", 303)
    return _back(created, "created")


@router.get("/accounts/{account}", dependencies=[LOGGED_IN])
def show_account(account: str, request: Request, database: DatabaseDep) -> HTMLResponse:
    """Show one account: tokens, open Holds, keys, the newest entries."""
    account_id = account_id_of(account)
    before = key_id_of(request.query_params.get("keys_before"))
    context = database.read(lambda conn: _read_account(conn, account_id, before))
    if context is None:
        raise no_account(account)
    here = f"{PATH}/accounts/{account}"
    return render(
        request,
        "account.html",
        **context,
        **(live_at("account", account=account) if before is None else stands_still(here)),
        said=SAID.get(request.query_params.get("said", "")),
        form_token=uuid4(),
    )


def followed(request: Request) -> Followed:
    """Say how the page of one account is followed. Raises NotFoundError."""
    name = request.query_params.get("account", "")
    account_id = account_id_of(name)
    return Followed(
        key=f"account {account_id.hex}",
        read=lambda conn: _read_account(conn, account_id, None),
        pieces=PIECES,
        missing=lambda: no_account(name),
    )


def _read_account(conn: Conn, account_id: UUID, keys_before: UUID | None) -> dict[str, Any] | None:
    view = view_account(conn, account_id)
    if view is None:
        return None
    return {
        "view": view,
        "account": view.account,
        "account_ref": public_id("acct", account_id),
        "keys": list_key_page(conn, account_id, keys_before),
        "keys_first": keys_before is None,
    }


@router.get("/accounts/{account}/ledger", dependencies=[LOGGED_IN])
def show_ledger(account: str, request: Request, database: DatabaseDep) -> HTMLResponse:
    """List the entries of an account, newest first; `kind=grants` leaves the rest out."""
    account_id = account_id_of(account)
    grants_only = request.query_params.get("kind") == "grants"
    before = entry_id_of(request.query_params.get("before"))
    context = database.read(
        lambda conn: _read_ledger(conn, account_id, grants_only=grants_only, before=before)
    )
    if context is None:
        raise no_account(account)
    named = {"account": account, **({"kind": "grants"} if grants_only else {})}
    first = f"{PATH}/accounts/{account}/ledger{'?kind=grants' if grants_only else ''}"
    moves = live_at("ledger", **named) if before is None else stands_still(first)
    return render(request, "ledger.html", **context, **moves)


def followed_ledger(request: Request) -> Followed:
    """Say how the newest entries of an account are followed. Raises NotFoundError."""
    name = request.query_params.get("account", "")
    account_id, grants_only = account_id_of(name), request.query_params.get("kind") == "grants"
    return Followed(
        key=f"ledger {account_id.hex} {grants_only}",
        read=lambda conn: _read_ledger(conn, account_id, grants_only=grants_only),
        pieces=LEDGER_PIECES,
        missing=lambda: no_account(name),
    )


def _read_ledger(
    conn: Conn, account_id: UUID, *, grants_only: bool, before: int | None = None
) -> dict[str, Any] | None:
    row = read_account(conn, account_id)
    if row is None:
        return None
    entries = list_entries(conn, account_id, limit=PAGE + 1, before=before, grants_only=grants_only)
    return {
        "account": row,
        "account_ref": public_id("acct", account_id),
        "entries": entries[:PAGE],
        "older": entries[PAGE - 1].id if len(entries) > PAGE else None,
        "first": before is None,
        "grants_only": grants_only,
    }


@router.post("/accounts/{account}/tokens/ask", dependencies=[ADMIN])
def ask_tokens(
    account: str, request: Request, form: FormDep, database: DatabaseDep
) -> HTMLResponse:
    """Show what a grant or a reversal would do, and ask for it once more."""
    account_id = account_id_of(account)
    kind, amount, note = _tokens(form)
    row = database.read(lambda conn: read_account(conn, account_id))
    if row is None:
        raise no_account(account)
    if kind == "reversal":
        _check_reversal(row, amount)
    return render(
        request,
        "tokens.html",
        account=row,
        account_ref=public_id("acct", account_id),
        kind=kind,
        amount=amount,
        note=note,
        balance_after=row.balance + (amount if kind == "grant" else -amount),
        form_token=uuid4(),
    )


@router.post("/accounts/{account}/tokens")
def move_tokens(account: str, operator: Admin, form: FormDep, database: DatabaseDep) -> Response:
    """Grant tokens, or take them back; a form that is sent twice counts once."""
    account_id, token = account_id_of(account), form.token()
    kind, amount, note = _tokens(form)

    def move(conn: Conn) -> bool:
        row = read_account(conn, account_id, lock=True)
        if row is None:
            raise no_account(account)
        if was_recorded(conn, token):
            return False
        if kind == "reversal":
            _check_reversal(row, amount)
        (grant_tokens if kind == "grant" else reverse_tokens)(conn, account_id, amount, note)
        after = read_account(conn, account_id)
        assert after is not None
        record(
            conn,
            operator,
            f"tokens.{kind}",
            public_id("acct", account_id),
            before={"balance": row.balance, "held": row.held},
            after={"balance": after.balance, "held": after.held, "amount": amount, "note": note},
            token=token,
        )
        return True

    return _back(account_id, kind if database.run(move) else "again")


@router.post("/accounts/{account}/holds/stop")
def stop(account: str, operator: Steward, form: FormDep, database: DatabaseDep) -> Response:
    """Let the account place no new Holds; what runs goes on."""
    account_id, reason = account_id_of(account), form.text("reason", chars_max=NOTE_CHARS_MAX)

    def act(conn: Conn) -> None:
        if read_account(conn, account_id, lock=True) is None:
            raise no_account(account)
        if not stop_holds(conn, account_id, reason):
            msg = "Holds of this account are stopped already; the reason is on its page."
            raise ConflictError(msg)
        record(
            conn,
            operator,
            "holds.stop",
            public_id("acct", account_id),
            before={"holds_stopped_reason": None},
            after={"holds_stopped_reason": reason},
        )

    database.run(act)
    return _back(account_id, "stopped")


@router.post("/accounts/{account}/holds/allow")
def allow(account: str, operator: Admin, database: DatabaseDep) -> Response:
    """Let the account place Holds again."""
    account_id = account_id_of(account)

    def act(conn: Conn) -> None:
        row = read_account(conn, account_id, lock=True)
        if row is None:
            raise no_account(account)
        if not allow_holds(conn, account_id):
            msg = "Nothing keeps this account from placing Holds."
            raise ConflictError(msg)
        record(
            conn,
            operator,
            "holds.allow",
            public_id("acct", account_id),
            before={"holds_stopped_reason": row.holds_stopped_reason},
            after={"holds_stopped_reason": None},
        )

    database.run(act)
    return _back(account_id, "allowed")


def account_id_of(text: str) -> UUID:
    """Read the id of an account in an address. Raises NotFoundError."""
    account_id = parse_id("acct", text)
    if account_id is None:
        raise no_account(text)
    return account_id


def no_account(text: str) -> NotFoundError:
    """Make the error for an account that does not exist."""
    return NotFoundError(f"There is no account {text[:80]!r}.")


def entry_id_of(text: str | None) -> int | None:
    """Read where a page of entries begins. Raises InvalidRequestError."""
    if text is None:
        return None
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    msg = f"before must be the number of an entry, not {text[:50]!r}."
    raise InvalidRequestError(msg, param="before")


def _tokens(form: Form) -> tuple[Kind, int, str]:
    kind = form.text("kind")
    if kind not in ("grant", "reversal"):
        msg = f"kind must be grant or reversal, not {kind[:50]!r}."
        raise InvalidRequestError(msg, param="kind")
    amount = form.number("amount", 1, GRANT_MAX)
    return kind, amount, form.text("note", chars_max=NOTE_CHARS_MAX)  # type: ignore[return-value]


def _check_reversal(row: AccountRow, amount: int) -> None:
    if amount > row.available:
        msg = (
            f"{amount:,} tokens cannot be taken back: the account has {row.available:,} available "
            f"({row.balance:,} less {row.held:,} held). Take back less, or cancel its Jobs first."
        )
        raise ConflictError(msg, param="amount")


def _back(account_id: UUID, said: str) -> RedirectResponse:
    return RedirectResponse(f"{PATH}/accounts/{public_id('acct', account_id)}?said={said}", 303)
