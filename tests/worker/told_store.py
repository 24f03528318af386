"""An S3 endpoint that does as it is told: takes, refuses or holds what it is asked, and counts it.

A gateway that is stopped refuses everything, and one that stands still hangs with everything;
here a test says which request meets what.
"""

import threading
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from app.storage import ObjectStore, open_store

BUCKET = "told"
HELD_SECONDS = 120.0  # longer than any test waits
Which = Callable[[str, str], bool]  # by method and key


def nothing(_method: str, _key: str) -> bool:
    """Choose no request."""
    return False


def everything(_method: str, _key: str) -> bool:
    """Choose every request."""
    return True


class ToldStore:
    """Keeps its objects in memory. What `refuses` chooses is 403; what `holds` chooses waits."""

    def __init__(self) -> None:
        """Serve on a free port; takes everything until it is told otherwise."""
        self.refuses: Which = nothing
        self.holds: Which = nothing
        self.asked: list[tuple[str, str]] = []  # method and key, as they came
        self.objects: dict[str, bytes] = {}
        self.gate = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.told = self
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """How an S3 client finds and enters it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "a secret for tests only",
            "AWS_REGION": "us-east-1",
        }

    def open(self) -> ObjectStore:
        """Open it as worker and API do; its environment must be set."""
        return open_store(f"s3://{BUCKET}")

    def keys(self, method: str) -> list[str]:
        """List the keys that were asked for by this method, as often as they were."""
        return [key for asked, key in list(self.asked) if asked == method]

    def release(self) -> None:
        """Answer what is held, and hold what `holds` chooses from now on."""
        gate, self.gate = self.gate, threading.Event()
        gate.set()

    def stop(self) -> None:
        """Hold nothing any more and end."""
        self.holds = nothing
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    told: ToldStore


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        told = self.server.told
        key, gate = self.path.split("?")[0].removeprefix(f"/{BUCKET}/"), told.gate
        told.asked.append((self.command, key))
        if told.holds(self.command, key):
            gate.wait(HELD_SECONDS)
        if told.refuses(self.command, key):
            self.say(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif self.command == "PUT":
            told.objects[key] = body
            self.say(200)
        elif self.command == "DELETE":
            told.objects.pop(key, None)
            self.say(204)
        else:
            self.read(told.objects.get(key))

    do_GET = do_HEAD = do_PUT = do_DELETE = answer  # noqa: N815 (names of the base class)

    def read(self, data: bytes | None) -> None:
        if data is None:
            self.say(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif wanted := self.headers.get("Range"):
            start, end = map(int, wanted.removeprefix("bytes=").split("-"))
            span = f"bytes {start}-{end}/{len(data)}"
            self.say(206, data[start : end + 1], {"Content-Range": span})
        else:
            self.say(200, data)

    def say(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("ETag", '"etag"')
        self.send_header("Last-Modified", formatdate(usegmt=True))
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""
