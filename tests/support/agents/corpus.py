"""The requests of coding agents as they are kept: their shape, and none of their makers' prose.

    python -m tests.support.agents.corpus ENVIRONMENTS [NAME ...]

Runs the agents that are installed below ENVIRONMENTS, as `make test-clients` does, and writes
`recorded/NAME.jsonl`: a request a line.  A text is kept as its length, unless it is a word of an
API or the task's own; paths and ids are replaced.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.records import frozen
from tests.support.agents.exchanges import Exchange
from tests.support.agents.plan import AGENTS, Agent
from tests.support.agents.running import run

RECORDED = Path(__file__).parent / "recorded"
# Others have ids and times, or are made by whatever sends the request.
_HEADERS = ("accept", "accept-encoding", "anthropic-beta", "anthropic-version", "content-type")
_WORD = re.compile(r"[\w.$:/#<>-]{0,64}")
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|\b[a-z]{2,8}_[0-9A-Za-z-]{20,}")
# Of schemas, and of calls, which are the task's own.
_KEPT = ("enum", "const", "pattern", "required", "default", "arguments")
_INPUT = ("input", "tool_use")
_FILLER = "the model reads what the tool has said and then it writes the next call "
_TEXT = "$text"


@frozen
class Recorded:
    """One request, its texts filled up to their lengths."""

    agent: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


def recorded(name: str) -> Iterator[Recorded]:
    """The requests of one agent, in order."""
    for line in (RECORDED / f"{name}.jsonl").read_text("utf-8").splitlines():
        request = json.loads(line)
        yield Recorded(name, request["path"], request["headers"], _filled(request["body"]))


def lines_of(exchanges: list[Exchange], root: Path) -> Iterator[str]:
    """What is kept of the requests of a run in the folder `root`."""
    reduced = _Reduced(root)
    for each in exchanges:
        body = reduced.value(json.loads(each.body))
        headers = {name: each.headers[name] for name in _HEADERS if name in each.headers}
        yield json.dumps({"path": each.path, "headers": headers, "body": body}, ensure_ascii=False)


@dataclass(slots=True)
class _Reduced:
    """Reduces values alike: what is one id in two requests stays one."""

    root: Path
    ids: dict[str, str] = field(default_factory=dict)

    def value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            own = "arguments"
            names = {
                name: own if own in (key, name) or (name, value.get("type")) == _INPUT else name
                for name in value
            }
            return {name: self.value(each, names[name]) for name, each in value.items()}
        if isinstance(value, list):
            return [self.value(each, key) for each in value]
        return self.text(value, key) if isinstance(value, str) else value

    def text(self, text: str, key: str) -> Any:
        text = text.replace(str(self.root / "work"), "/repository")
        text = _ID.sub(lambda found: self._id(found[0]), text)
        if key in _KEPT or _WORD.fullmatch(text):
            return text
        return {_TEXT: len(text)}

    def _id(self, found: str) -> str:
        if found not in self.ids:
            prefix = found.partition("_")[0] + "_" if "_" in found else ""
            self.ids[found] = f"{prefix}{len(self.ids):0{len(found) - len(prefix)}}"
        return self.ids[found]


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        if _TEXT in value:
            size = value[_TEXT]
            return (_FILLER * (size // len(_FILLER) + 1))[:size]
        return {name: _filled(each) for name, each in value.items()}
    return [_filled(each) for each in value] if isinstance(value, list) else value


def record(agent: Agent, folder: Path) -> None:
    """Run the agent that is installed in `folder`, and write what it asked."""
    with tempfile.TemporaryDirectory() as name:
        outcome = run(agent, folder, Path(name))
        if problems := outcome.problems():
            raise SystemExit(f"{agent.name}: {'; '.join(problems)}")
        lines = lines_of(outcome.exchanges, Path(name))
        (RECORDED / f"{agent.name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.support.agents.corpus")
    parser.add_argument("environments", type=Path)
    parser.add_argument("names", nargs="*", default=[agent.name for agent in AGENTS])
    arguments = parser.parse_args()
    RECORDED.mkdir(exist_ok=True)
    for agent in AGENTS:
        if agent.name in arguments.names:
            record(agent, arguments.environments.absolute() / agent.name)


if __name__ == "__main__":
    main()
