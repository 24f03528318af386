"""The S3 store of the image `objects`: JuiceFS' gateway over one volume, for one machine.

`serve` makes the bucket when the volume is empty and becomes the gateway; `check` asks whether it
answers. The keys are those of OBJECTS_ACCESS_KEY and OBJECTS_SECRET_KEY. Metadata (a SQLite file)
and blocks lie side by side in /var/lib/objects: back up both together, with the gateway stopped.
"""  # noqa: INP001 (copied into an image as a single file)

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

VOLUME = Path("/var/lib/objects")
PORT = 9000
JUICEFS = str(Path(sys.prefix) / "bin" / "juicefs")


def serve() -> None:
    """Make the bucket once, then become the gateway."""
    metadata = f"sqlite3://{VOLUME / 'metadata.db'}"
    bucket = os.environ.get("OBJECTS_BUCKET", "tiller")
    if not (VOLUME / "metadata.db").exists():
        blocks = ["--storage", "file", "--bucket", f"{VOLUME / 'blocks'}/", "--trash-days", "0"]
        subprocess.run([JUICEFS, "format", *blocks, metadata, bucket], check=True)
    environment = {
        **os.environ,
        "MINIO_ROOT_USER": os.environ["OBJECTS_ACCESS_KEY"],
        "MINIO_ROOT_PASSWORD": os.environ["OBJECTS_SECRET_KEY"],
    }
    options = ["--no-banner", "--keep-etag", "--hide-dir-object", "--log", "/tmp/gateway.log"]  # noqa: S108 (a tmpfs)
    command = [JUICEFS, "gateway", *options, metadata, f"0.0.0.0:{PORT}"]
    os.execve(JUICEFS, command, environment)  # noqa: S606 (the gateway takes over this process)


def check() -> None:
    """Raise unless the gateway answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/minio/health/live", timeout=3):
        pass


if __name__ == "__main__":
    {"serve": serve, "check": check}[sys.argv[1]]()
