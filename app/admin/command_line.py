"""What an operator does with `python -m app`: accounts, grants and keys, written down.

Who may run it holds the database and the pepper, so nobody is asked who they are; the audit log
names the command line.
"""

from collections.abc import Collection
from uuid import UUID

from app.accounts.accounts import MintedKey, create_account, create_key
from app.accounts.keys import Role
from app.admin.audit import COMMAND_LINE, record
from app.kit.db import Conn
from app.kit.ids import public_id
from app.ledger.holds import grant_tokens

NOTE = "granted on the command line"


def make_account(conn: Conn, name: str, *, grant: int = 0) -> UUID:
    """Create an account, grant it tokens unless `grant` is 0, and write both down."""
    account_id = create_account(conn, name)
    target = public_id("acct", account_id)
    record(conn, None, "account.create", target, after={"name": name}, actor=COMMAND_LINE)
    if grant:
        grant_tokens(conn, account_id, grant, NOTE)
        record(
            conn,
            None,
            "tokens.grant",
            target,
            before={"balance": 0, "held": 0},
            after={"balance": grant, "held": 0, "amount": grant, "note": NOTE},
            actor=COMMAND_LINE,
        )
    return account_id


def make_key(
    conn: Conn,
    account_id: UUID,
    pepper: str,
    *,
    name: str,
    scopes: Collection[str],
    role: Role | None = None,
) -> MintedKey:
    """Create a key of an account and write it down, but for its secret."""
    if "admin" in scopes:
        role = role or "admin"
    made = create_key(conn, account_id, pepper, name=name, scopes=scopes, role=role)
    record(
        conn,
        None,
        "key.create",
        public_id("key", made.id),
        after={
            "account": public_id("acct", account_id),
            "name": name,
            "scopes": sorted(scopes),
            "role": role,
            "last4": made.secret[-4:],
        },
        actor=COMMAND_LINE,
    )
    return made
