"""Every fenced block of every page is read by what it is written for.

A command by our own parsers, YAML by what reads such a file, Python by the compiler, JSON and
PromQL by theirs.  Those of README.md and docs/requests.md are typed against a server, too
(tests/deployments/test_readme.py).  `text` is for pictures, formulas and what programs print.
"""

import ast
import importlib
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from cluster.config.doors import KeysFile
from cluster.config.file import load, parse_arguments
from cluster.config.parse import key_of, parse
from cluster.config.schema import Config
from cluster.errors import DrafthouseError
from cluster.records import frozen
from cluster.simulate.settings import Settings
from deployments import vllm_options
from deployments.asked import DEMONSTRATION
from deployments.cli import parser_for
from deployments.ingress.api.pages import ENDPOINTS, PAGES
from tests.test_docs import ROOT, pages

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_OUR_PACKAGES = ("benchmarks", "cluster", "deployments", "tests")
_PYTHONS = ("python", ".venv/bin/python")
_DRAFTHOUSES = ("drafthouse", ".venv/bin/drafthouse")
# Programs of others.  Their commands are read as far as they name modules of ours.
_FOREIGN = {
    ".venv/bin/mutmut",
    "accelerate",
    "aider",
    "apt-get",
    "cd",
    "claude",
    "docker",
    "echo",
    "export",
    "grpcurl",
    "helm",
    "kubectl",
    "mini",
    "node",
    "npm",
    "pip",
    "qwen",
    "ray",
    "sed",
    "vllm",
}
_TARGET = {"engine": {"model": "models/demo-target"}}


@frozen
class Fence:
    """A fenced block.  language: "" = the shell."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fences() -> Iterator[Fence]:
    for page in pages():
        name, text = str(page.relative_to(ROOT)), page.read_text("utf-8")
        for found in _FENCE.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            if "─" not in found[3]:  # a picture
                yield Fence(name, line, found[2], re.sub(f"^{found[1]}", "", found[3], flags=re.M))


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command, without what stands around it in the shell."""
    text = re.sub(r"(^|\s)#.*$", r"\1", text, flags=re.MULTILINE).replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|>&;\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words = []
    is_a_file = False
    for word in [*lexer, "\n"]:
        if not set(word) - set("|&;\n"):
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words
            words = []
        elif is_a_file or word == ">":
            is_a_file = word == ">"
        else:
            words.append(word)


def check_shell(text: str, _: Path) -> None:
    for words in commands(text):
        check_command(words)


def check_command(words: list[str]) -> None:
    program, *arguments = words
    if program in _DRAFTHOUSES:
        check_drafthouse(arguments)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert arguments[0] in targets, words
        if arguments[0] == "serve":
            given = dict(word.split("=", 1) for word in arguments[1:])
            check_drafthouse(["serve", *shlex.split(given.get("ARGS", ""))])
    elif "/" in program and program not in _PYTHONS and program not in _FOREIGN:
        assert (ROOT / program).exists(), program
    elif program == "curl":
        check_curl(arguments)
    else:
        assert program in {*_FOREIGN, *_PYTHONS}, f"nobody checks {words}"
        assert program not in _PYTHONS or "-m" in arguments, words
    if "-m" in arguments:
        module = arguments[arguments.index("-m") + 1]
        if module.partition(".")[0] in _OUR_PACKAGES:
            assert importlib.util.find_spec(module) is not None, module


def check_drafthouse(arguments: list[str]) -> None:
    """Parse a command line, with what it changes of a configuration that is here."""
    try:
        parsed = parser_for(arguments).parse_args(arguments)
    except SystemExit as error:
        raise AssertionError(f"drafthouse {shlex.join(arguments)} is refused") from error
    if parsed.verb in ("serve", "check", "plan", "evaluate"):
        _, settings = vllm_options.asked(parsed)
        name = parsed.file or DEMONSTRATION
        if name.startswith("configs/"):
            load(ROOT / name, settings)


def check_curl(arguments: list[str]) -> None:
    (address,) = [word for word in arguments if word.startswith("http")]
    path = "/" + address.split("/", 3)[-1].partition("?")[0]
    assert path in {each.path for each in (*ENDPOINTS, *PAGES)}, address
    if "-d" in arguments:
        json.loads(arguments[arguments.index("-d") + 1])


def check_python(text: str, _: Path) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OUR_PACKAGES):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, each.name) for each in node.names), node.module


def check_json(text: str, _: Path) -> None:
    json.loads(text)


def check_promql(text: str, _: Path) -> None:
    for expression in text.split("\n\n"):
        promql_parser.parse(expression)


def check_yaml(text: str, folder: Path) -> None:
    # Digests that a page cuts short.
    document = yaml.safe_load(re.sub(r"\b[0-9a-f]{8,}\.\.\.", "a" * 64, text))
    keys = set(document)
    if "applications" in keys:
        check_file(document, folder)
    elif keys <= {key_of(field) for field in fields(Config)}:
        base = {"target": _TARGET} if "drafters" in keys else some_arguments()
        parse_arguments({**base, **document})
    elif keys <= {"keys", "classes"}:
        parse(KeysFile, document)
    elif "ratios" in keys:
        parse(Settings, document)
    elif "models" in keys:  # Continue's
        check_address(document["models"][0]["apiBase"])
    else:  # What others' programs read is tried with them: tests/k8s, test_monitoring.py.
        assert document.get("kind") == "Kustomization" or "rule_files" in keys, keys
        for path in re.findall(r"[./]*(k8s/[\w./-]+)", text):
            assert (ROOT / path).exists(), path


def check_toml(text: str, _: Path) -> None:
    for provider in tomllib.loads(text)["model_providers"].values():  # Codex's
        check_address(provider["base_url"])


def check_address(address: str) -> None:
    """Of ours, below which a client asks for chats and the like."""
    assert re.fullmatch(r"http://127\.0\.0\.1:8000/v1", address), address


def check_file(document: dict[str, Any], folder: Path) -> None:
    """Load a whole file; where the page leaves the arguments out, with others."""
    (application, *_) = document["applications"]
    if application["args"] == {"...": None}:
        application["args"] = some_arguments()
        document["proxy_location"] = "Disabled"
    path = folder / "file.yaml"
    path.write_text(yaml.safe_dump(document), "utf-8")
    load(path)


def some_arguments() -> dict[str, Any]:
    """What a page takes for granted where it shows a part."""
    options = {"engine": {"model": "models/demo-draft"}}
    lm = {"kind": "lm", "options": options, "placement": {"num_cpus": 0.1}}
    tasks = {"default": ["lm", "suffix"], "batch": ["suffix"]}
    return {
        "target": _TARGET,
        "drafters": {"lm": lm, "suffix": {"kind": "suffix"}},
        "tasks": tasks,
    }


CHECKS = {
    "": check_shell,
    "python": check_python,
    "json": check_json,
    "promql": check_promql,
    "toml": check_toml,
    "yaml": check_yaml,
    "text": lambda _text, _folder: None,
}


@pytest.mark.parametrize("fence", fences(), ids=str)
def test_a_fence_is_what_its_reader_takes(fence: Fence, tmp_path: Path):
    assert fence.language in CHECKS, "say what checks such fences"
    CHECKS[fence.language](fence.text, tmp_path)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("", "drafthouse serve configs/tiny.yaml --set http.prt=1"),
        ("", "drafthouse serv"),
        ("", "make nothing"),
        ("", "make serve ARGS='--set http.prt=1'"),
        ("", "echo a | unknown"),
        ("", "curl http://127.0.0.1:8000/v1/nothing"),
        ("", ".venv/bin/python -m benchmarks.nothing > file"),
        ("yaml", "coordinator: {audit: {shar: 0.1}}"),
        ("yaml", "rules: [{task: a, drafts: perhaps}]"),
        ("yaml", "models: [{apiBase: 'http://127.0.0.1:8000'}]"),
        ("toml", "[model_providers.a]\nbase_url = 'http://127.0.0.1:8000'"),
        ("python", "from cluster.core import Nothing"),
        ("json", "{"),
        ("promql", "sum by (key"),
    ],
)
def test_a_wrong_fence_is_noticed(language: str, text: str, tmp_path: Path):
    with pytest.raises((AssertionError, DrafthouseError, ValueError, SyntaxError)):
        CHECKS[language](text, tmp_path)
