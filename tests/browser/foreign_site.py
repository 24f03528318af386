"""A site of somebody else on this machine: a real server, on a port and under a name of its own.

`localhost` is another site than 127.0.0.1, another port of 127.0.0.1 is another origin of the
same site: browsers keep SameSite cookies from the first and send them from the second.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Site:
    """Pages by their path; where a form that is sent here is sent on to, by its path."""

    port: int
    pages: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)

    @property
    def cross_site(self) -> str:
        """Its address as another site than the dashboard's."""
        return f"http://localhost:{self.port}"

    @property
    def same_site(self) -> str:
        """Its address as another port of the dashboard's host."""
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def opened() -> Iterator[Site]:
    """Serve a site until the block ends."""
    site = Site(0)

    class Answers(BaseHTTPRequestHandler):
        timeout = 20

        def do_GET(self) -> None:
            page = site.pages.get(self.path)
            content = ("Nothing here" if page is None else page).encode("utf-8", "surrogatepass")
            self.send_response(404 if page is None else 200)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", "0")))
            self.send_response(307)  # the browser sends the same form again, there
            self.send_header("location", site.moved[self.path])
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base's name)
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing of browsers that hang up."""

    with Server(("127.0.0.1", 0), Answers) as server:
        site.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
