"""`python -m app COMMAND`: one entrance for API, reconciler, stack and the operator's chores.

Imports are inside the commands, because each needs a different part of the service and none
should wait for the others' libraries.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from app.settings import load_settings

if TYPE_CHECKING:
    from app.kit.db import Conn

KEEP_ALIVE_SECONDS = 75  # longer than load balancers keep idle connections, so they close first
GRACE_SECONDS = 5
BACKLOG = 1024
OPERATORS = "operators"  # the account of dashboard keys that are made on the command line
NAME_CHARS = 200


def serve(options: argparse.Namespace) -> int:
    """Run the API until SIGTERM."""
    import socket

    import uvicorn

    from app.kit.logs import configure_logs
    from app.main import create_app

    configure_logs("api")
    settings = load_settings()
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        backlog=BACKLOG,
        access_log=False,  # the application logs each request itself, with its id
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        h11_max_incomplete_event_size=64 * 1024,
    )
    sockets = None if options.fd is None else [socket.socket(fileno=options.fd)]
    server = uvicorn.Server(config)
    server.run(sockets=sockets)
    return 0 if server.started else 1


def reconcile(_options: argparse.Namespace) -> int:
    """Run the reconciler until SIGTERM."""
    from app.kit.logs import configure_logs
    from app.reconcile.loop import run_reconciler

    configure_logs("reconciler")
    run_reconciler(load_settings())
    return 0


def up(options: argparse.Namespace) -> int:
    """Run the whole stack of one data folder."""
    from app.stack.settings import load_stack_settings
    from app.stack.up import up as run_stack

    return run_stack(
        options.data_dir.resolve(),
        port=options.port,
        model=options.model,
        settings=load_stack_settings(),
    )


def migrate(_options: argparse.Namespace) -> int:
    """Bring the database to the newest schema."""
    from app.kit.migrate import migrate as run_migrations

    _say(f"the schema is at revision {run_migrations(load_settings().database_url)}")
    return 0


def create_account(options: argparse.Namespace) -> int:
    """Create an account, grant it tokens and print its first key."""
    from app.accounts.accounts import find_account
    from app.admin.command_line import make_account, make_key
    from app.kit.ids import public_id

    with _accounts(options) as (conn, pepper):
        there = find_account(conn, options.name)
        if there is not None:
            return _complain(
                f"there is an account {options.name!r} already, {public_id('acct', there)}: name "
                f"this one otherwise, or `create-key --account {shlex.quote(options.name)}` for it"
            )
        account_id = make_account(conn, options.name, grant=options.grant)
        key = make_key(conn, account_id, pepper, name="first key", scopes=_scopes(options))
    _say(json.dumps({"account": public_id("acct", account_id), "api_key": key.secret}))
    return 0


def create_key(options: argparse.Namespace) -> int:
    """Create another key of an account and print it."""
    from app.accounts.accounts import find_account
    from app.admin.account_reads import read_account
    from app.admin.command_line import make_key
    from app.kit.ids import parse_id, public_id

    with _accounts(options) as (conn, pepper):
        account_id = parse_id("acct", options.account) or find_account(conn, options.account)
        if account_id is None or read_account(conn, account_id) is None:
            return _complain(f"there is no account {options.account!r}")
        key = make_key(conn, account_id, pepper, name=options.name, scopes=_scopes(options))
    _say(json.dumps({"key": public_id("key", key.id), "api_key": key.secret}))
    return 0


def create_admin(options: argparse.Namespace) -> int:
    """Create a key for the dashboard and print it; it belongs to the account `operators`."""
    from app.accounts.accounts import find_account
    from app.admin.command_line import make_account, make_key
    from app.kit.ids import public_id

    with _accounts(options) as (conn, pepper):
        account_id = find_account(conn, OPERATORS) or make_account(conn, OPERATORS)
        key = make_key(
            conn, account_id, pepper, name=options.name, scopes={"admin"}, role=options.role
        )
    _say(
        json.dumps({"key": public_id("key", key.id), "role": options.role, "admin_key": key.secret})
    )
    return 0


def check(options: argparse.Namespace) -> int:
    """Tell whether a part on this machine works: what a container's health check asks."""
    from app.check import CheckSettings
    from app.check import check as find_fault

    fault = find_fault(options.part, CheckSettings())
    if fault is not None:
        _say(fault)
    return 0 if fault is None else 1


def verify(options: argparse.Namespace) -> int:
    """Compare the database with its own rules and every file with its row; change nothing."""
    from app.kit.db import Database
    from app.storage import StoreError, open_store
    from app.verify import VerifySettings, broken_rules, wrong_files

    settings = VerifySettings(**_parts(options))
    database = Database(settings.database_url, size_max=2)
    faults, files = broken_rules(database), 0
    for line in faults:
        _say(line)
    try:
        store = open_store(settings.object_store)
        for page in wrong_files(database, store, contents=options.contents):
            files += len(page)
            for line in filter(None, page):
                faults.append(line)
                _say(line)
    except StoreError as error:
        reason = str(error).split("\n", 1)[0]
        faults.append(f"the object store cannot be read: {reason}")
        _say(faults[-1])
    database.close()
    _say(f"{files} files looked at, {len(faults)} faults found")
    return 1 if faults else 0


def openapi(_options: argparse.Namespace) -> int:
    """Print the OpenAPI document."""
    from app.main import create_app

    _say(json.dumps(create_app(load_settings()).openapi(), indent=1))
    return 0


CHORES = (create_account, create_key, create_admin, verify)
COMMANDS = (serve, reconcile, up, migrate, *CHORES, check, openapi)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except Exception as error:
        reason = _in_words(error)
        if reason is None:
            raise
        return _complain(reason)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m app", description="Parts of Tiller.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in COMMANDS:
        name = command.__name__.replace("_", "-")
        sub = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        sub.set_defaults(run=command)
        if command is serve:
            sub.add_argument("--fd", type=int, help="serve on this open socket")
        elif command is check:
            sub.add_argument("part", choices=("api", "reconciler", "worker"))
        elif command is up:
            sub.add_argument("--data-dir", type=Path, default=Path("data"), help="default: ./data")
            sub.add_argument("--port", type=int, default=8400, help="0 takes a free one")
            sub.add_argument("--model", help="what the worker serves; default: the first one")
        elif command in CHORES:
            _describe_chore(sub, command)
    return parser


def _describe_chore(sub: argparse.ArgumentParser, chore: Callable[..., int]) -> None:
    sub.add_argument(
        "--data-dir",
        type=Path,
        metavar="FOLDER",
        help="the data folder of a `tiller up` that runs; without it TILLER_… variables are read",
    )
    if chore is verify:
        sub.add_argument(
            "--contents", action="store_true", help="read every file and compare its sha256"
        )
        return
    of_whom = "who will use it" if chore is create_admin else None
    sub.add_argument("--name", required=True, type=_name, help=of_whom)
    if chore is create_admin:
        roles = ["read-only", "operator", "admin"]
        sub.add_argument("--role", default="admin", choices=roles, help="default: admin")
        return
    sub.add_argument(
        "--scope", action="append", type=_scope, help="may be repeated; default: all but admin"
    )
    if chore is create_account:
        sub.add_argument("--grant", type=_tokens, default=0, metavar="TOKENS")
    else:
        sub.add_argument("--account", required=True, help="its id or its name")


def _name(text: str) -> str:
    if not 0 < len(text.strip()) <= NAME_CHARS or "\0" in text:
        msg = f"a name has 1 to {NAME_CHARS} characters"
        raise argparse.ArgumentTypeError(msg)
    return text.strip()


def _scope(text: str) -> str:
    from app.accounts.accounts import SCOPES

    if text not in SCOPES:
        msg = f"there is no scope {text!r}; there are {', '.join(sorted(SCOPES))}"
        raise argparse.ArgumentTypeError(msg)
    return text


def _tokens(text: str) -> int:
    from app.ledger.holds import GRANT_MAX

    if not (text.isascii() and text.isdecimal() and int(text) <= GRANT_MAX):
        msg = f"a grant is a whole number of tokens from 0 to {GRANT_MAX}, not {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _scopes(options: argparse.Namespace) -> list[str]:
    from app.accounts.accounts import USER_SCOPES

    return list(options.scope or USER_SCOPES)


def _parts(options: argparse.Namespace) -> dict[str, Any]:
    """Find the parts of the `tiller up` that a chore is for; empty when variables name them."""
    from app.stack.running import parts_of
    from app.stack.settings import load_stack_settings

    folder: Path | None = options.data_dir
    return {} if folder is None else parts_of(folder.resolve(), load_stack_settings())


@contextmanager
def _accounts(options: argparse.Namespace) -> "Iterator[tuple[Conn, str]]":
    """Give a transaction on the accounts, and the pepper of their keys."""
    from app.kit.db import Database
    from app.settings import ChoreSettings

    settings = ChoreSettings(**_parts(options))
    database = Database(settings.database_url, size_max=1)
    try:
        with database.transaction() as conn:
            yield conn, settings.key_pepper.get_secret_value()
    finally:
        database.close()


def _in_words(error: Exception) -> str | None:
    """Say what an operator has to do; None for an error that only its traceback explains."""
    from app.kit.db import DatabaseUnavailableError
    from app.settings import settings_in_words
    from app.stack.running import NothingRunsError

    if isinstance(error, ValidationError) and error.title.endswith("Settings"):
        return settings_in_words(error)
    known = isinstance(error, (DatabaseUnavailableError, NothingRunsError))
    return str(error) if known else None


def _complain(line: str) -> int:
    sys.stderr.write(f"python -m app: {line}\n")
    return 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
