"""The part of the Hugging Face hub's HTTP API by which snapshots are fetched, on this machine."""

import hashlib
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.conftest import python

COMMIT = "b" * 40
# Prints of each word the folder that it names as a model or as a draft head, what serving a model
# says, or why there is none.
NAMED = """
import sys
from cluster.config.schema import Config, EngineConfig, TargetConfig
from cluster.errors import ConfigError
from cluster.models.resolve import resolve, resolve_head
from deployments.configured_models import fetch_models
for word in sys.argv[1:]:
    kind, _, model = word.partition(":")
    try:
        if kind == "serve":
            fetch_models(Config(target=TargetConfig(engine=EngineConfig(model=model))))
        else:
            print(resolve(model) if kind == "model" else resolve_head(model))
    except ConfigError as error:
        print(error)
"""


def named(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that has said what the words name."""
    return python("-c", NAMED, *words, **environment)


@dataclass
class FakeHub:
    """One repository, `org/tiny`.  fetched: names of the files that were asked for."""

    folder: Path
    url: str = ""
    fetched: set[str] = field(default_factory=set)


@contextmanager
def fake_hub(folder: Path) -> Iterator[FakeHub]:
    """Serve the files of `folder` until the end of the block."""
    hub = FakeHub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            names = sorted(path.name for path in folder.iterdir())
            name = self.path.rpartition("/")[2].partition("?")[0]
            if "/api/models/org/tiny/tree/" in self.path:
                self.answer(json.dumps([_listed(folder / each) for each in names]).encode())
            elif self.path.startswith("/api/models/org/tiny"):
                siblings = [{"rfilename": each} for each in names]
                found = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
                self.answer(json.dumps(found).encode())
            elif self.path.startswith("/org/tiny/resolve/") and name in names:
                hub.fetched.add(name)
                self.answer((folder / name).read_bytes())
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Not on the tests' output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _listed(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    oid = hashlib.sha1(data).hexdigest()
    return {"type": "file", "path": path.name, "size": len(data), "oid": oid}
