"""What README.md and docs/requests.md print is typed as printed, against a real server.

The server has the embedded pair under the name that `make serve` gives its model.  What is changed
in a block before it is typed:

- the ports 8000 and 9000 become free ones, so that the test runs beside other servers
- `.venv/bin/` becomes the environment of this test, and /data/my-model the embedded target
- `make` only tells what it would do, `drafthouse serve` is checked and not served a second time,
  and `grpcurl` does nothing where it is not installed
"""

import json
import re
import sys
from collections.abc import Iterator

import pytest
import yaml

from cluster.config.file import load
from cluster.records import frozen
from tests.conftest import REPOSITORY, command
from tests.deployments.conftest import free_ports
from tests.support.choices import by_night
from tests.support.deployments.command import Command

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PRELUDE = """set -euo pipefail
make() { command make --dry-run "$@"; }
command -v grpcurl > /dev/null || grpcurl() { echo "not installed"; }
"""


@frozen
class Block:
    """One fenced block.  language: "" = the shell."""

    page: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}, block {self.number}"


def blocks(page: str) -> list[Block]:
    """What a reader would type, for the shell and Python.  Pictures and output are neither."""
    found = _FENCE.findall((REPOSITORY / page).read_text("utf-8"))
    typed = [(language, text) for language, text in found if language in ("", "python")]
    return [
        Block(page, number, language, text)
        for number, (language, text) in enumerate(typed, start=1)
        if "─" not in text
    ]


BLOCKS = [*blocks("README.md"), *blocks("docs/requests.md")]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server of the embedded pair, in processes of its own: its addresses, by the pages'."""
    http, grpc, dashboard = free_ports(3)
    document = yaml.safe_load((REPOSITORY / "configs/tiny.yaml").read_text("utf-8"))
    arguments = document["applications"][0]["args"]
    arguments["http"]["port"] = http
    # Drawn by chance, a form may stay open: the end of the context ends it.
    arguments["target"]["engine"]["max_context_len"] = 512
    names = ("lm", "suffix")
    arguments["drafters"] = {name: arguments["drafters"][name] for name in names}
    arguments["tasks"] = {"default": list(names), "code": list(names)}
    arguments["model_name"] = load("configs/local.yaml").config.model_name
    arguments["grpc"]["port"] = grpc
    arguments["dashboard"] = {"port": dashboard}
    folder = tmp_path_factory.mktemp("readme")
    (folder / "serve.yaml").write_text(yaml.safe_dump(document))
    server = Command(folder, str(folder / "serve.yaml"))
    try:
        server.wait_for("Drafthouse is ready:")
        host = "127.0.0.1"
        yield {f"{host}:8000": f"{host}:{http}", f"{host}:9000": f"{host}:{grpc}"}
        server.check_end("the group")
    finally:
        server.end()


CHANGES = {
    "/data/my-model": "models/demo-target",
    ".venv/bin/drafthouse serve": ".venv/bin/drafthouse check",
    ".venv/bin/drafthouse": f"{sys.executable} -m deployments.cli",
}


def as_typed(block: Block, addresses: dict[str, str]) -> list[str]:
    """The command that runs the block."""
    text = block.text
    for printed, typed in (addresses | CHANGES).items():
        text = text.replace(printed, typed)
    if block.language == "python":
        return [sys.executable, "-c", text]
    return ["bash", "-c", _PRELUDE + text]


def problem_of(returncode: int, output: str) -> str | None:
    """What is wrong with what a block printed; curl's status says nothing of HTTP's."""
    if returncode:
        return f"exit status {returncode}"
    if not output.strip():
        return "it printed nothing"
    if output.startswith("{") and "choices" not in json.loads(output):
        return "the server did not answer the request"
    return None


@by_night
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_the_page_prints_works_as_printed(block: Block, addresses: dict[str, str]):
    done = command(*as_typed(block, addresses), PYTHONPATH=str(REPOSITORY))
    problem = problem_of(done.returncode, done.stdout)
    assert problem is None, f"{block}: {problem}\n{done.stdout}\n{done.stderr}"


def test_the_pages_name_the_model_and_the_ports_of_make_serve():
    config = load("configs/local.yaml").config
    assert (config.http.port, config.grpc.port) == (8000, 9000)
    text = "".join(block.text for block in BLOCKS)
    assert set(re.findall(r"model\"?[:=] ?\"([^\"]+)\"", text)) == {config.model_name}
    assert set(re.findall(r"127\.0\.0\.1:(\d+)", text)) == {"8000", "9000"}


def test_the_first_page_shows_all_kinds_of_use():
    first = "".join(block.text for block in BLOCKS if block.page == "README.md")
    for words in ("make serve", "make test", "curl http", "OpenAI(", "configs/own-model.yaml"):
        assert words in first
