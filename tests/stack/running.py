"""A `tiller up` in a process of its own, seen from outside."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from tests.rules.source_tree import ROOT
from tests.stack.waiting import wait_for

MARK = "TILLER_TEST_STACK"


class RunningStack:
    """Starts the stack of a data folder and finds every process that came of it."""

    def __init__(
        self, data_dir: Path, *options: str, prefix: Sequence[str] = (), **environment: str
    ) -> None:
        self.data_dir = data_dir
        self.mark = uuid.uuid4().hex
        self.started_at = time.time()
        command = [
            *prefix,
            sys.executable,
            "-m",
            "tests.stack.stub_up",
            "--data-dir",
            str(data_dir),
        ]
        self.process = subprocess.Popen(
            [*command, "--port", "0", *options],
            cwd=ROOT,
            env={**os.environ, **environment, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_ready(self) -> dict[str, str]:
        """Wait for credentials.json and read it."""
        file = self.data_dir / "credentials.json"

        def is_written() -> bool:
            return file.exists() and file.stat().st_mtime >= self.started_at

        wait_for(lambda: is_written() or self.process.poll() is not None, "credentials.json")
        assert self.process.poll() is None, self.process.stdout.read()
        return json.loads(file.read_text())

    def api(self, path: str, **options) -> httpx.Response:
        """Ask the API with the ordinary key."""
        credentials = json.loads((self.data_dir / "credentials.json").read_text())
        headers = {"authorization": f"Bearer {credentials['api_key']}"}
        with httpx.Client(base_url=credentials["api_base"], headers=headers) as client:
            return client.request(options.pop("method", "GET"), path, timeout=30, **options)

    def find(self, *words: str) -> psutil.Process | None:
        """Find the process of this stack whose command line holds all the words."""
        for process in self.processes():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if all(word in line for word in words):
                return process
        return None

    def worker(self) -> psutil.Process | None:
        """Find the worker."""
        return self.find("celeryd: bare")  # Celery writes its own title

    def processes(self) -> list[psutil.Process]:
        """List everything alive that came of this stack, servers and guardian included."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(MARK) == self.mark
                ours = str(self.data_dir / "postgres") in process.cwd()
                ours = ours or str(self.data_dir / "redis") in " ".join(process.cmdline())
                if (marked or ours) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def stop(self, how: signal.Signals = signal.SIGTERM) -> str:
        """Stop it as a person would; return what it printed."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        printed, _ = self.process.communicate(timeout=40)
        return printed

    def kill(self) -> None:
        """Kill the supervisor, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
