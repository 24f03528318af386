"""`python -m app COMMAND`: one entrance for API, reconciler, stack and the operator's chores.

Imports are inside the commands, because each needs a different part of the service and none
should wait for the others' libraries.
"""

import argparse
import json
import sys
from pathlib import Path

from app.settings import load_settings

KEEP_ALIVE_SECONDS = 75  # longer than load balancers keep idle connections, so they close first
GRACE_SECONDS = 5
BACKLOG = 1024
OPERATORS = "operators"  # the account of dashboard keys that are made on the command line


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
    from app.admin.command_line import make_account, make_key
    from app.kit.db import Database
    from app.kit.ids import public_id

    settings = load_settings()
    database = Database(settings.database_url, size_max=1)
    pepper = settings.key_pepper.get_secret_value()
    with database.transaction() as conn:
        account_id = make_account(conn, options.name, grant=options.grant)
        key = make_key(conn, account_id, pepper, name="first key", scopes=_scopes(options))
    database.close()
    _say(json.dumps({"account": public_id("acct", account_id), "api_key": key.secret}))
    return 0


def create_key(options: argparse.Namespace) -> int:
    """Create another key of an account and print it."""
    from app.accounts.accounts import find_account
    from app.admin.command_line import make_key
    from app.kit.db import Database
    from app.kit.ids import parse_id, public_id

    settings = load_settings()
    database = Database(settings.database_url, size_max=1)
    pepper = settings.key_pepper.get_secret_value()
    with database.transaction() as conn:
        account_id = parse_id("acct", options.account) or find_account(conn, options.account)
        if account_id is None:
            sys.stderr.write(f"there is no account {options.account!r}\n")
            return 1
        key = make_key(conn, account_id, pepper, name=options.name, scopes=_scopes(options))
    database.close()
    _say(json.dumps({"key": public_id("key", key.id), "api_key": key.secret}))
    return 0


def create_admin(options: argparse.Namespace) -> int:
    """Create a key for the dashboard and print it; it belongs to the account `operators`."""
    from app.accounts.accounts import find_account
    from app.admin.command_line import make_account, make_key
    from app.kit.db import Database
    from app.kit.ids import public_id

    settings = load_settings()
    database = Database(settings.database_url, size_max=1)
    pepper = settings.key_pepper.get_secret_value()
    with database.transaction() as conn:
        account_id = find_account(conn, OPERATORS) or make_account(conn, OPERATORS)
        key = make_key(
            conn, account_id, pepper, name=options.name, scopes={"admin"}, role=options.role
        )
    database.close()
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

    settings = VerifySettings()
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


COMMANDS = (
    *(serve, reconcile, up, migrate),
    *(create_account, create_key, create_admin, check, verify, openapi),
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    options = _parser().parse_args(arguments)
    status: int = options.run(options)
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
        elif command is verify:
            sub.add_argument(
                "--contents", action="store_true", help="read every file and compare its sha256"
            )
        elif command is up:
            sub.add_argument("--data-dir", type=Path, default=Path("data"), help="default: ./data")
            sub.add_argument("--port", type=int, default=8400, help="0 takes a free one")
            sub.add_argument("--model", help="what the worker serves; default: the first one")
        elif command in (create_account, create_key):
            sub.add_argument("--name", required=True)
            sub.add_argument(
                "--scope", action="append", help="may be repeated; default: all but admin"
            )
        elif command is create_admin:
            sub.add_argument("--name", required=True, help="who will use it")
            sub.add_argument(
                "--role",
                default="admin",
                choices=["read-only", "operator", "admin"],
                help="default: admin",
            )
        if command is create_account:
            sub.add_argument("--grant", type=int, default=0, metavar="TOKENS")
        elif command is create_key:
            sub.add_argument("--account", required=True, help="its id or its name")
    return parser


def _scopes(options: argparse.Namespace) -> list[str]:
    from app.accounts.accounts import USER_SCOPES

    return list(options.scope or USER_SCOPES)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
