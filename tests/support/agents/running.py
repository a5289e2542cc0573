"""Runs one coding agent in a repository of its own, against a model that is a script."""

import contextlib
import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

from benchmarks.support.processes import run_to_end
from cluster.config.schema import Config
from cluster.records import frozen
from tests.support.agents.exchanges import Exchange, Exchanges
from tests.support.agents.plan import CHECK, COMMAND_RAN, GREET, MODEL, NEW, Agent, filled
from tests.support.agents.written import WritingTarget, chat_folder
from tests.support.deployments.scripted import scripted

# Node and Python start within seconds; an agent that waits for an answer never ends.
_TIMEOUT_S = 180.0
# All of a prompt in one step: a toy reads it at once.
_LIMITS = {"max_context_len": 131072, "max_batch_tokens": 131072}
_NOBODY = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
# How the streams of the three APIs end.
_ENDS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed")


@frozen
class Outcome:
    """status: None = it took too long.  elsewhere: what it asked of other addresses."""

    status: int | None
    output: str
    exchanges: list[Exchange]
    elsewhere: list[str]
    is_edited: bool
    has_run: bool

    def problems(self) -> list[str]:
        """What did not go as it should, in words."""
        asked = [each for each in self.exchanges if each.method == "POST"]
        found = [] if self.status == 0 else [f"exit status {self.status}: {self.output[-300:]}"]
        found += [] if self.is_edited else ["the file is not edited"]
        found += [] if self.has_run else ["the command did not run"]
        found += [f"it asked elsewhere: {one}" for one in self.elsewhere]
        for each in self.exchanges:
            if each.status >= HTTPStatus.BAD_REQUEST:
                found.append(f"{each.path} {each.status}: {each.answer[:300].decode()}")
            elif each.is_stream and not (each.is_whole and _is_ended(each.answer)):
                found.append(f"{each.path}: the stream ends with {each.answer[-200:].decode()}")
        if len({each.body for each in asked}) < len(asked):
            found.append("it asked the same again")
        return found


def run(agent: Agent, folder: Path, root: Path, config: Config | None = None) -> Outcome:
    """Let the agent do its task; root: an empty folder.  folder: where the agent is installed."""
    home, work, text = (root / name for name in ("home", "work", "text"))
    for each in (home, work, text):
        each.mkdir(parents=True)
    (work / "greet.py").write_text(GREET, "utf-8")
    (work / "check.py").write_text(CHECK, "utf-8")
    for words in (["init", "-q"], ["add", "."], [*_NOBODY, "commit", "-qm", "Greet"]):
        subprocess.run(["git", *words], cwd=work, check=True)
    noted: list[Exchange] = []
    model = WritingTarget(chat_folder(text), agent.answer(work))
    config = config or Config(model_name=MODEL)
    with (
        scripted(text, config, model, lambda app: Exchanges(app, noted), **_LIMITS) as server,
        _elsewhere() as (proxy, elsewhere),
    ):
        place = {"url": server.url, "folder": folder, "home": home, "work": work}
        for name, content in filled(agent.files, **place).items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            (home / name).write_text(text, "utf-8")
        environment = _environment(home) | (_proxied(proxy) if agent.heeds_no_proxy else {})
        status, output = run_to_end(
            agent.command(**place),
            work,
            environment | filled(agent.environment, **place),
            root / "output.log",
            _TIMEOUT_S,
        )
    if agent.asks_anyway:
        elsewhere = [each for each in elsewhere if agent.asks_anyway not in each]
    is_edited = NEW in (work / "greet.py").read_text("utf-8")
    return Outcome(status, output, noted, elsewhere, is_edited, (work / COMMAND_RAN).exists())


def _environment(home: Path) -> dict[str, str]:
    """Nothing of this process's own, which may have keys."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {
        "HOME": str(home),
        "PATH": path,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "DO_NOT_TRACK": "1",
    }


def _proxied(proxy: str) -> dict[str, str]:
    here = "127.0.0.1,localhost"
    names = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": here}
    return names | {name.lower(): value for name, value in names.items()}


def _is_ended(answer: bytes) -> bool:
    """Whether its last event, which may be as long as a request, is one with which streams end."""
    return answer.rstrip().rpartition(b"\n\n")[2].startswith(_ENDS)


@contextlib.contextmanager
def _elsewhere() -> Iterator[tuple[str, list[str]]]:
    """A proxy that refuses everything, and the first lines of what it was asked."""
    asked = []

    class Refuse(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline(1000).decode("latin-1").strip())
            self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refuse) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
