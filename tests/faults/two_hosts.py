"""Hosts in network and mount namespaces of their own, joined by a bridge of this machine.

    bridge 10.77.N.1: Postgres, Redis, S3 gateway, API, reconciler
      |- veth - host-a 10.77.N.11: one worker
      `- veth - host-b 10.77.N.12: one worker

A host sees the service's addresses and nothing else of it: the folder with the servers' data is
covered by an empty one in its mount namespace. Nothing here leaves this machine, and everything
is taken down at the end. Needs root, `ip` (iproute2) and `unshare` (util-linux).
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psycopg

from app.kit.db import Database
from app.kit.migrate import migrate
from app.queue import Waker
from app.stack.postgres import DATABASE, USER, EmbeddedPostgres
from app.stack.redis import _binary as redis_binary
from app.storage import open_store
from tests.faults.cluster import FAST, RECONCILE_SECONDS, Cluster, WorkerProcess
from tests.fixtures.api import a_key, settings_for
from tests.fixtures.builders import Builders
from tests.fixtures.history import record_history
from tests.rules.source_tree import ROOT
from tests.storage.gateway import Gateway

POSTGRES_PORT, REDIS_PORT, GATEWAY_PORT, API_PORT = 5432, 6379, 9000, 8400
# What a host's processes do not see of this machine is under an empty file system.
ENTER = (
    'hostname "$0" && mount -t tmpfs tmpfs "$1" && mount -t tmpfs tmpfs "$2" && shift 2'
    ' && exec "$@"'  # a shell in between would be killed in its child's place
)

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Host:
    """A network namespace with one address, and this machine's end of its cable."""

    name: str
    namespace: str
    cable: str
    address: str

    def cut(self) -> None:
        """Pull the cable: packets vanish, connections are not closed."""
        ip("link", "set", self.cable, "down")

    def join(self) -> None:
        """Put the cable back."""
        ip("link", "set", self.cable, "up")


class Network:
    """A bridge and its hosts; names and addresses belong to this process alone."""

    def __init__(self) -> None:
        """Make the bridge."""
        self.prefix = _free_prefix()
        self.address = f"{self.prefix}.1"
        # At most 15 characters, with the end of a cable's name.
        self.bridge = f"tlr{os.getpid()}n{next(_numbers)}"
        self.hosts: list[Host] = []
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def add_host(self, name: str) -> Host:
        """Make a host and connect it."""
        count = len(self.hosts) + 1
        cable = f"{self.bridge}v{count}"
        host = Host(name, f"{self.bridge}-{name}", cable, f"{self.prefix}.{10 + count}")
        ip("netns", "add", host.namespace)
        self.hosts.append(host)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        ip("link", "set", cable, "master", self.bridge, "up")
        inside = ("-n", host.namespace)
        ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        ip(*inside, "link", "set", "eth0", "up")
        ip(*inside, "link", "set", "lo", "up")
        return host

    def close(self) -> None:
        """Take everything down."""
        for host in self.hosts:
            ip("netns", "del", host.namespace)
        ip("link", "del", self.bridge)


def _free_prefix() -> str:
    """Choose a network that no bridge of this machine has, another process' ones included."""
    said = subprocess.run(
        ["ip", "-4", "-oneline", "addr"], check=True, capture_output=True, text=True
    )
    prefixes = (f"10.77.{(os.getpid() + count) % 250 + 1}" for count in range(250))
    return next(prefix for prefix in prefixes if f" {prefix}." not in said.stdout)


class Far(Cluster):
    """A cluster whose workers live on other hosts and reach objects by S3 alone."""

    def __init__(self, folder: Path, network: Network, models_file: Path | None = None) -> None:
        """Start Postgres, Redis, S3 gateway and API on the bridge's address."""
        self.folder, self.network = folder, network
        self.mark = uuid.uuid4().hex
        self.workers: list[WorkerProcess] = []
        self.killed_servers: list[int] = []
        self._stop = threading.Event()
        self._stop_reconciler = threading.Event()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        servers = folder / "servers"
        servers.mkdir()
        self.gateway = Gateway(servers / "s3", address=network.address, port=GATEWAY_PORT)
        os.environ.update(self.gateway.environment)
        self._start_postgres(servers / "postgres")
        self._start_redis(servers / "redis")
        given = {} if models_file is None else {"models_file": models_file}
        self.settings = settings_for(
            folder,
            database_url=f"postgresql://{USER}@{network.address}:{POSTGRES_PORT}/{DATABASE}",
            redis_url=f"redis://{network.address}:{REDIS_PORT}/0",
            object_store=self.gateway.url,
            reconcile_seconds=RECONCILE_SECONDS,
            lease_seconds=float(FAST["TILLER_LEASE_SECONDS"]),
            shard_requests_max=32,
            **given,
        )
        self.database = Database(self.settings.database_url, size_max=8)
        self.store = open_store(self.settings.object_store)
        self.waker = Waker(self.settings.redis_url)
        self.builders = Builders(self.database)
        self._environment = {**os.environ, **FAST, **self._addresses()}
        self.api_base = f"http://{network.address}:{API_PORT}"
        self.key = a_key(self.database, balance=10_000_000)[1]
        self._start_api()
        self._spawn(self._supervise, "supervisor")

    def start_on(self, host: Host, module: str, **environment: str) -> WorkerProcess:
        """Start a worker on a host; objects, servers and other hosts' scratch are out of sight."""
        scratch = self.folder / f"scratch-{host.name}"
        scratch.mkdir(exist_ok=True)
        inside = [sys.executable, "-m", module, "--model", "tiny"]
        hidden = [str(self.folder / "servers"), str(scratch)]
        worker = WorkerProcess(
            [
                *("ip", "netns", "exec", host.namespace),
                *("unshare", "--mount", "--uts", "sh", "-c", f"{ENTER}", host.name),
                *hidden,
                *("env", *inside),
            ],
            {**self._environment, "TILLER_SCRATCH_DIR": str(scratch), **environment},
            self.folder / f"{host.name}.log",
        )
        self.workers.append(worker)
        return worker

    def client(self) -> httpx.Client:
        """A client of the API in the third place."""
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.api_base, headers=headers, timeout=30)

    def close(self) -> None:
        """Stop everything that was started."""
        self._stop.set()
        self._stop_reconciler.set()
        for thread in self._threads:
            thread.join(30)
        for worker in self.workers:
            worker.end()
        for process in self._processes:
            process.kill()
            process.wait()
        self.database.close()
        self.waker.close()
        self.postgres.stop()
        self.gateway.stop()
        for name in self.gateway.environment:
            os.environ.pop(name, None)
        shutil.rmtree(self.folder / "servers", ignore_errors=True)

    def _start_postgres(self, folder: Path) -> None:
        address = {"listen_addresses": self.network.address, "port": str(POSTGRES_PORT)}
        self.postgres = EmbeddedPostgres(folder, options=address)
        self.postgres.start()
        with (folder / "data" / "pg_hba.conf").open("a", encoding="utf-8") as file:
            file.write(f"host all all {self.network.prefix}.0/24 trust\n")
        with psycopg.connect(self.postgres.url, autocommit=True) as conn:
            conn.execute("SELECT pg_reload_conf()")
        migrate(self.postgres.url)
        with psycopg.connect(self.postgres.url) as conn:
            record_history(conn)

    def _start_redis(self, folder: Path) -> None:
        folder.mkdir()
        options = ["--bind", self.network.address, "--port", str(REDIS_PORT), "--save", ""]
        command = [str(redis_binary()), *options, "--dir", str(folder)]
        self._run("redis", command, dict(os.environ))

    def _start_api(self) -> None:
        environment = {
            **self._environment,
            "TILLER_HOST": self.network.address,
            "TILLER_PORT": str(API_PORT),
            "TILLER_KEY_PEPPER": self.settings.key_pepper.get_secret_value(),
            "TILLER_SHARD_REQUESTS_MAX": str(self.settings.shard_requests_max),
        }
        self._run("api", [sys.executable, "-m", "app", "serve"], environment)

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.api_base}/healthz").is_success
            return False

        self.wait(answers, "the API")

    def _run(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self._processes.append(process)


@contextlib.contextmanager
def two_hosts(folder: Path, models_file: Path | None = None) -> Iterator[tuple[Far, Host, Host]]:
    """Give a cluster in the third place and two hosts without workers."""
    with contextlib.ExitStack() as stack:
        network = Network()
        stack.callback(network.close)
        hosts = network.add_host("host-a"), network.add_host("host-b")
        far = Far(folder, network, models_file)
        stack.callback(far.close)
        far.start_reconciler()
        yield far, *hosts


def why_not() -> str | None:
    """Say what this machine lacks to be several hosts; None when it lacks nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    name = f"tiller-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    ip("netns", "del", name)
    return None


def ip(*words: str) -> None:
    """Run `ip` with these words."""
    subprocess.run(["ip", *words], check=True)
