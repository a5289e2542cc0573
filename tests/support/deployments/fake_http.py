"""A server of one path."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


@contextmanager
def answering(path: str, body: bytes, status: int = 200) -> Iterator[int]:
    """Its port, on the loopback interface; all other paths are 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path == path
            self.send_response(status if is_known else 404)
            self.end_headers()
            self.wfile.write(body if is_known else b"")

        def log_message(self, format: str, *args: object) -> None:
            """Not on the tests' output."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
