"""Secrets of a local stack: the pepper, two API keys, and the file that says "ready".

    pepper            made once; without it no key opens anything
    keys.json         the plain keys, kept so that a second start hands out the same ones
    credentials.json  what clients read; exists exactly while the stack is ready

All three are readable by their owner alone and written in one step.
"""

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from app.accounts.accounts import SCOPES, USER_SCOPES, create_account, create_key, find_account
from app.accounts.keys import find_key, key_digest
from app.kit.db import Conn
from app.ledger.holds import grant_tokens

ACCOUNT_NAME = "local"
GRANT_TOKENS = 1_000_000_000_000  # more than one machine can spend
CREDENTIALS = "credentials.json"


@dataclass(frozen=True, slots=True)
class Keys:
    """The plain keys of the local account."""

    api_key: str
    admin_key: str


def load_pepper(data_dir: Path) -> str:
    """Read the pepper of this data folder; make it the first time."""
    file = data_dir / "pepper"
    if not file.exists():
        write_private(file, secrets.token_hex(32))
    return file.read_text(encoding="utf-8").strip()


def load_keys(conn: Conn, data_dir: Path, pepper: str) -> Keys:
    """Give the keys of the local account; make account, grant and keys where they are missing.

    Keys that the database does not know (it was replaced, or the pepper was) are made anew.
    """
    file = data_dir / "keys.json"
    known = _read(file)
    if known is not None and all(
        find_key(conn, key_digest(key, pepper)) for key in (known.api_key, known.admin_key)
    ):
        return known
    account = find_account(conn, ACCOUNT_NAME)
    if account is None:
        account = create_account(conn, ACCOUNT_NAME)
        grant_tokens(conn, account, GRANT_TOKENS, "granted when this stack first started")
    user = create_key(conn, account, pepper, name="local", scopes=USER_SCOPES)
    admin = create_key(conn, account, pepper, name="local admin", scopes=SCOPES)
    keys = Keys(api_key=user.secret, admin_key=admin.secret)
    # Before the commit: a file without rows is made anew, rows without a file would pile up.
    write_private(file, json.dumps(asdict(keys), indent=1))
    return keys


def write_credentials(data_dir: Path, keys: Keys, *, address: str) -> Path:
    """Write the file that tells clients where to go; `address` is http://HOST:PORT."""
    content = {
        "api_base": f"{address}/v1",
        "api_key": keys.api_key,
        "admin_key": keys.admin_key,
        "dashboard_url": f"{address}/admin",
    }
    file = data_dir / CREDENTIALS
    write_private(file, json.dumps(content, indent=1) + "\n")
    return file


def remove_credentials(data_dir: Path) -> None:
    """Say that the stack is not ready (any more)."""
    (data_dir / CREDENTIALS).unlink(missing_ok=True)


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can read, in one step."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)


def _read(file: Path) -> Keys | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Keys(api_key=str(content["api_key"]), admin_key=str(content["admin_key"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
