"""`tiller up`: build the stack of one data folder, wait until it is ready, keep it running.

    lock -> model -> postgres -> redis -> schema -> keys -> API, reconciler, worker -> ready

Each step prints a line with the time it took. credentials.json is written last, once the worker
has proved its steering and the API answers, and removed first when the stack stops.
"""

import os
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import httpx

from app.catalog import CatalogError, load_catalog
from app.kit.db import RETRIED, Conn, Database, DatabaseUnavailableError
from app.kit.migrate import migrate
from app.stack.credentials import (
    CREDENTIALS,
    Keys,
    load_keys,
    load_pepper,
    remove_credentials,
    write_credentials,
)
from app.stack.data_folder import FolderInUseError, owned_folder
from app.stack.guardian import Guardian
from app.stack.log_file import LogFile
from app.stack.part import ChildPart, Server, ServerPart
from app.stack.postgres import EmbeddedPostgres, PostgresStartError
from app.stack.processes import TOKEN_VARIABLE, new_token
from app.stack.redis import EmbeddedRedis, RedisStartError
from app.stack.settings import StackSettings
from app.stack.supervisor import PartFailedError, StopRequested, Supervisor, print_line

DEFAULT_MODEL = "smollm2-135m"
WORKER = ("-m", "worker")
REPOSITORY = Path(__file__).resolve().parents[2]
FAILURES = (
    CatalogError,
    DatabaseUnavailableError,
    FolderInUseError,
    OSError,
    PartFailedError,
    PostgresStartError,
    RedisStartError,
    *RETRIED,
)


class ModelNotAddedError(Exception):
    """The default model could not be fetched; the command's own words were printed."""


def up(data_dir: Path, *, port: int, model: str | None, settings: StackSettings) -> int:
    """Run a stack until it is told to stop; return the exit status."""
    supervisor = Supervisor(print_line)
    with supervisor.signals():
        try:
            with owned_folder(data_dir) as note:
                token = new_token()
                guardian = Guardian(token, promise=data_dir / CREDENTIALS, remember=note)
                stack = _Stack(data_dir, supervisor, settings, token, guardian=guardian)
                try:
                    stack.run(port=port, model=model)
                finally:
                    stack.stop()
        except StopRequested:
            print_line("stopped; the data stays in " + str(data_dir))
            return 0
        except (*FAILURES, ModelNotAddedError) as error:
            sys.stderr.write(f"tiller up: {error}\n")
            return 1
    return 0


class _Stack:
    """The steps of one start, and what they need of each other."""

    def __init__(
        self,
        data_dir: Path,
        supervisor: Supervisor,
        settings: StackSettings,
        token: str,
        *,
        guardian: Guardian,
    ) -> None:
        self._data_dir = data_dir
        self._supervisor = supervisor
        self._settings = settings
        self._token = token
        self._guardian = guardian
        self._models_file = settings.models_file or data_dir / "models.toml"
        self._database: Database | None = None
        self._listener: socket.socket | None = None
        self._started = self._step_started = time.monotonic()

    def run(self, *, port: int, model: str | None) -> None:
        """Start everything, then watch it until StopRequested."""
        remove_credentials(self._data_dir)
        self._listener = _listen(self._settings.host, port)
        model = self._find_model(model)
        environment = self._start_servers()
        database_url = environment["TILLER_DATABASE_URL"]
        revision = migrate(database_url)
        self._step("schema", f"revision {revision}")
        pepper = environment["TILLER_KEY_PEPPER"]
        self._database = database = Database(database_url, size_max=1)
        keys = database.run(lambda conn: load_keys(conn, self._data_dir, pepper))
        self._step("account", "local, with an API key and an admin key")
        since = database.run(_database_time)
        worker = self._start_children(environment, model)
        address = self._address()
        self._supervisor.run_until(lambda: _answers(f"{address}/healthz"))
        self._step("api", address)
        self._supervisor.run_until(lambda: _is_worker_ready(database, worker, since))
        self._step("worker", f"{model}, steering proved")
        self._finish(keys, address)
        self._supervisor.run_until(lambda: False)

    def stop(self) -> None:
        """Stop everything that was started."""
        remove_credentials(self._data_dir)
        print_line("stopping")
        if self._database is not None:
            self._database.close()
        self._supervisor.stop()
        if self._listener is not None:
            self._listener.close()
        self._guardian.dismiss()

    def _find_model(self, model: str | None) -> str:
        """Choose the model that the worker serves; fetch the default one into an empty folder."""
        if not self._models_file.exists():
            if self._settings.models_file is not None or model not in (None, DEFAULT_MODEL):
                msg = f"{self._models_file} does not exist; run `tiller models add` first."
                raise CatalogError(msg)
            self._add_default_model()
        catalog = load_catalog(self._models_file)  # also records checksums, once for all children
        name = model or catalog.all()[0].name
        if name not in {served.name for served in catalog.all()}:
            names = ", ".join(served.name for served in catalog.all())
            msg = f"{self._models_file} has no model {name!r}; it has: {names}."
            raise CatalogError(msg)
        self._step("model", name)
        return name

    def _add_default_model(self) -> None:
        print_line(f"fetching {DEFAULT_MODEL} (once; about 90 MB, then half a minute)")
        command = [sys.executable, "-m", "worker.models", "add", DEFAULT_MODEL]
        command += ["--data-dir", str(self._data_dir)]
        environment = {**os.environ, TOKEN_VARIABLE: self._token}
        child = subprocess.Popen(command, env=environment, cwd=REPOSITORY, start_new_session=True)
        try:
            self._supervisor.run_until(lambda: child.poll() is not None)
        finally:
            child.kill()
            child.wait()
        if child.returncode:
            msg = f"{DEFAULT_MODEL} could not be added."
            raise ModelNotAddedError(msg)

    def _start_servers(self) -> dict[str, str]:
        """Start what is embedded; return the environment of every child."""
        settings, data_dir = self._settings, self._data_dir
        database_url, redis_url = settings.database_url, settings.redis_url
        if database_url is None:
            postgres = EmbeddedPostgres(data_dir / "postgres")
            self._start_server("postgres", postgres, data_dir / "postgres" / "postgres.log")
            database_url = postgres.url
        if redis_url is None:
            redis = EmbeddedRedis(data_dir / "redis")
            self._start_server("redis", redis, data_dir / "redis" / "redis.log")
            redis_url = redis.url
        given = settings.key_pepper
        pepper = load_pepper(data_dir) if given is None else given.get_secret_value()
        scratch = settings.scratch_dir or data_dir / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        objects = settings.object_store
        if objects is None:
            (data_dir / "objects").mkdir(parents=True, exist_ok=True)
            objects = f"file://{data_dir / 'objects'}"
        return {
            **os.environ,
            "TILLER_DATABASE_URL": database_url,
            "TILLER_REDIS_URL": redis_url,
            "TILLER_OBJECT_STORE": objects,
            "TILLER_MODELS_FILE": str(self._models_file),
            "TILLER_SCRATCH_DIR": str(scratch),
            "TILLER_KEY_PEPPER": pepper,
            "TILLER_HOST": settings.host,
            "TILLER_PORT": str(self._port()),
            "TILLER_SHUTDOWN_SECONDS": str(settings.shutdown_seconds),
            TOKEN_VARIABLE: self._token,
            "SPT_NOENV": "1",  # or setproctitle overwrites the token that finds the engine
            "PYTHONUNBUFFERED": "1",
        }

    def _start_server(self, name: str, server: Server, log: Path) -> None:
        stop_signal = ServerPart.STOP_SIGNALS[name]
        part = ServerPart(
            name, server, LogFile(log), lambda pid: self._guardian.watch(pid, stop_signal)
        )
        self._supervisor.start(part)
        self._step(name, f"process {part.pid}")

    def _start_children(self, environment: dict[str, str], model: str) -> ChildPart:
        """Start API, reconciler and worker; return the worker."""
        assert self._listener is not None
        descriptor = self._listener.fileno()
        serve = ["-m", "app", "serve", "--fd", str(descriptor)]
        worker = self._child("worker", [*WORKER, "--model", model], environment)
        for part in (
            worker,  # first: its engine takes longest
            self._child("api", serve, environment, descriptors=(descriptor,)),
            self._child("reconciler", ["-m", "app", "reconcile"], environment),
        ):
            self._supervisor.start(part)
        return worker

    def _child(
        self,
        name: str,
        arguments: list[str],
        environment: dict[str, str],
        descriptors: tuple[int, ...] = (),
    ) -> ChildPart:
        return ChildPart(
            name,
            [sys.executable, *arguments],
            log=LogFile(self._data_dir / "logs" / f"{name}.log"),
            environment=environment,
            folder=REPOSITORY,
            descriptors=descriptors,
        )

    def _finish(self, keys: Keys, address: str) -> None:
        self._supervisor.ready()
        file = write_credentials(self._data_dir, keys, address=address)
        seconds = time.monotonic() - self._started
        print_line(f"ready after {seconds:.1f} s")
        print_line(f"  API        {address}/v1")
        print_line(f"  dashboard  {address}/admin")
        print_line(f"  keys       {file}")
        print_line("  Ctrl-C stops everything")

    def _step(self, name: str, what: str) -> None:
        now = time.monotonic()
        print_line(f"{name:<11} {now - self._step_started:6.1f} s  {what}")
        self._step_started = now

    def _port(self) -> int:
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def _address(self) -> str:
        host = self._settings.host
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 (compared)
        return f"http://{shown}:{self._port()}"


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before anything is started; the API inherits it, also when it restarts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        msg = (
            f"port {port} of {host} cannot be used ({error.strerror}); choose one with --port "
            "(make up PORT=…)."
        )
        raise OSError(msg) from error


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _database_time(conn: Conn) -> datetime:
    row = conn.execute("SELECT clock_timestamp() AS now").fetchone()
    assert row is not None
    now: datetime = row["now"]
    return now


def _is_worker_ready(database: Database, worker: ChildPart, since: datetime) -> bool:
    """Tell whether our worker process says in Postgres that its canary passed."""

    def look(conn: Conn) -> bool:
        found = conn.execute(
            """
            SELECT 1 FROM workers
            WHERE pid = %s AND host = %s AND state = 'ready' AND started_at >= %s
            """,
            [worker.pid, socket.gethostname(), since],
        )
        return found.fetchone() is not None

    try:
        return database.run(look, attempts=1)
    except (*RETRIED, DatabaseUnavailableError):
        return False  # Postgres restarts; ask again
