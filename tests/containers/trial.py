"""Runs the images' own commands in the folders that tests/containers/roots.py built.

    python -m tests.containers.trial --base /path/to/debian --out /path/for/stages

Postgres and Redis run outside. Inside, as user 10001 on a read-only root: the one-shot migration,
API, reconciler and worker-cpu by their ENTRYPOINT and CMD, and every HEALTHCHECK. A Job of the
tiny random model must end with every request succeeded. `--mode compiled` lets the worker compile
it with what its image holds.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from app.stack.postgres import DATABASE, USER, EmbeddedPostgres
from app.stack.redis import _binary as redis_binary
from tests.containers.dockerfile import lineage
from tests.containers.roots import Builder
from tests.engine.tiny_model import make_tiny_llama

USER_ID = "10001"
WRITABLE = ("var/lib/tiller", "tmp")
SECONDS = 420.0
REQUESTS = 40
ADDRESS = "127.0.53.1"  # of Postgres; another loopback address needs no free port


class Trial:
    """Images of one set of stages, and the processes that were started from them."""

    def __init__(self, builder: Builder, folder: Path, environment: dict[str, str]) -> None:
        """Remember what every container is told."""
        self._builder, self._folder, self._environment = builder, folder, environment
        self._stack = contextlib.ExitStack()
        self._roots: dict[str, Path] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def root(self, image: str) -> Path:
        """Mount an image: read-only but for scratch, /tmp and the folders that are volumes."""
        if image in self._roots:
            return self._roots[image]
        root = self._stack.enter_context(self._builder.mounted(image))
        for name in ("models", "objects"):
            target = root / name
            target.mkdir(exist_ok=True)
            _mount(self._stack, "--bind", self._folder / name, target)
        _mount(self._stack, "-t", "tmpfs", "tmpfs", root / "var/lib/tiller")
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        for place in WRITABLE:
            (root / place).chmod(0o1777)
        # What Docker gives a tmpfs unless it is told otherwise.
        options = "remount,noexec,nosuid,nodev"
        subprocess.run(["mount", "-o", options, str(root / "tmp")], check=True)
        self._roots[image] = root
        return root

    def command(self, image: str, arguments: list[str] | None = None) -> list[str]:
        """Give ENTRYPOINT and CMD of an image, with other arguments when they are given."""
        steps = {
            word: step
            for stage in lineage(self._builder.stages, image)
            for word in ("ENTRYPOINT", "CMD")
            if (step := stage.last(word)) is not None
        }
        return [
            *steps["ENTRYPOINT"].exec_form(),
            *(steps["CMD"].exec_form() if arguments is None else arguments),
        ]

    def call(self, image: str, words: list[str], **options: bool) -> subprocess.CompletedProcess:
        """Run a command in an image to its end."""
        return subprocess.run(
            self._inside(image, words), env=self._env(image), capture_output=True, text=True,
            check=options.get("check", True), timeout=SECONDS,
        )  # fmt: skip

    def start(self, name: str, image: str, words: list[str]) -> None:
        """Start a process that stays."""
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._inside(image, words), env=self._env(image), stdout=log, stderr=log
            )

    def stop(self) -> dict[str, int]:
        """Send SIGTERM as a container engine does; give how long each took and its status."""
        statuses = {}
        for name, process in reversed(self._running.items()):
            process.terminate()
            try:
                statuses[name] = process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                statuses[name] = process.wait()
        self._stack.close()
        return statuses

    def _inside(self, image: str, words: list[str]) -> list[str]:
        enter = ["/bin/sh", "-c", 'cd /srv/tiller && exec "$@"', "sh", *words]
        return ["chroot", f"--userspec={USER_ID}:{USER_ID}", str(self.root(image)), *enter]

    def _env(self, image: str) -> dict[str, str]:
        return {**self._builder.environment(image), **self._environment}


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """Run Postgres and Redis on loopback; give what containers are told of them."""
    port = _free_port()
    postgres = EmbeddedPostgres(folder / "postgres", options={"listen_addresses": ADDRESS})
    postgres.start()
    redis = subprocess.Popen(
        [str(redis_binary()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""],
        cwd=folder,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield {
            "TILLER_DATABASE_URL": f"postgresql://{USER}@{ADDRESS}/{DATABASE}",
            "TILLER_REDIS_URL": f"redis://127.0.0.1:{port}/0",
        }
    finally:
        redis.terminate()
        redis.wait()
        postgres.stop()


def run(builder: Builder, folder: Path, mode: str) -> None:
    """Start everything, run a Job, ask every health check, stop everything."""
    for name in ("models", "objects"):
        (folder / name).mkdir()
    make_tiny_llama(folder / "models" / "llama")
    (folder / "models" / "models.toml").write_text(
        '[models.tiny]\npath = "llama"\ndtype = "float32"\nmax_num_seqs = 16\n'
        "max_num_batched_tokens = 512\nkv_cache_bytes = 67108864\nthreads = 1\n"
        f'mode = "{mode}"\n'
    )
    for path in (folder / "models", folder / "objects", *(folder / "models").rglob("*")):
        os.chown(path, int(USER_ID), int(USER_ID))
    port = _free_port()
    with servers(folder) as addresses:
        environment = {
            **addresses,
            "TILLER_OBJECT_STORE": "file:///objects",
            "TILLER_MODELS_FILE": "/models/models.toml",
            "TILLER_KEY_PEPPER": "a pepper of this trial only",
            "TILLER_HOST": "127.0.0.1",
            "TILLER_PORT": str(port),
        }
        trial = Trial(builder, folder, environment)
        try:
            _use(trial, f"http://127.0.0.1:{port}")
        except BaseException:
            for log in folder.glob("*.log"):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")  # noqa: T201
            raise
        finally:
            print("stopped:", trial.stop())  # noqa: T201


def _use(trial: Trial, address: str) -> None:
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {what}", flush=True)  # noqa: T201

    say(trial.call("api", trial.command("api", ["migrate"])).stdout.strip())
    made = trial.call(
        "api", trial.command("api", ["create-account", "--name", "trial", "--grant", "1000000"])
    )
    key = json.loads(made.stdout)["api_key"]
    trial.start("api", "api", trial.command("api"))
    trial.start("reconciler", "api", trial.command("api", ["reconcile"]))
    trial.start("worker", "worker-cpu", trial.command("worker-cpu", ["--model", "tiny"]))
    with httpx.Client(base_url=address, headers={"authorization": f"Bearer {key}"}) as client:
        _wait(lambda: client.get("/readyz").is_success, "readyz")
        say("ready: the worker has proved that it steers")
        sent = [{"prompt": [3, 4 + i], "max_tokens": 8, "output_residual_stream": [1],
                 "apply_steering_vectors": [{"activations": [[0.1] * 64], "layer_indices": [0]}]}
                for i in range(REQUESTS)]  # fmt: skip
        job = client.post("/v1/jobs", json={"model": "tiny", "requests": sent}).json()["id"]
        _wait(lambda: client.get(f"/v1/jobs/{job}").json()["finished_at"], "the Job")
        counts = client.get(f"/v1/jobs/{job}").json()["request_counts"]
        assert counts["succeeded"] == REQUESTS, counts
        say(f"Job ended: {counts}")
        assert client.get("/metrics").is_success
    for image, part in (("api", "api"), ("api", "reconciler"), ("worker-cpu", "worker")):
        python = trial.command("api", ["check", part])
        trial.call(image, python)
        say(f"check {part}: healthy")
    refused = trial.call("api", ["/bin/sh", "-c", "touch /srv/tiller/app/x"], check=False)
    assert "Read-only file system" in refused.stderr, refused.stderr
    pip = trial.call("api", ["/opt/tiller/bin/python", "-m", "pip"], check=False)
    assert pip.returncode != 0, "pip is left in the image"
    say("the root is read-only, and there is no pip")


def _wait(condition, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)


def _mount(stack: contextlib.ExitStack, *words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)
    stack.callback(subprocess.run, ["umount", "--lazy", str(words[-1])], check=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> int:
    """Run the trial in a folder that is deleted afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tiller-trial-"))
    folder.chmod(0o755)
    try:
        builder = Builder(options.base.resolve(), options.out.resolve(), [], keep=True)
        run(builder, folder, options.mode)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
