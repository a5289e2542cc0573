"""Mistakes of the first hour: one line that says what to do, status 2, and before Ray starts."""

from __future__ import annotations

import json
import os
import shutil
import socket
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
from tests.config.test_refused import change
from tests.conftest import Run, python, serve_file
from tests.deployments.conftest import free_ports
from tests.deployments.test_doors import environment
from tests.support.choices import by_day
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
    http: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        http, grpc, dashboard = free_ports(3)
        self.http = {"host": "127.0.0.1", "port": http}
        self.args = {
            "target": {"engine": {"model": str(self.model), "device": "cpu", "threads": 1}},
            "drafters": {"lookup": {"kind": "prompt_lookup"}},
            "http": self.http,
            "grpc": {"port": grpc},
            "dashboard": {"port": dashboard},
        }

    @property
    def engine(self) -> dict[str, Any]:
        return dict.__getitem__(self.args["target"], "engine")

    def make(self, name: str) -> tuple[Path, list[str]]:
        """The file with the mistake of that name, and what must be said of it."""
        mistake = MISTAKES[name]
        for key, value in mistake.get("env", {}).items():
            self.environment.setenv(key, value)
        for key, value in mistake.get("set", {}).items():
            change(self.args, key, value)
        if "by" in mistake:
            globals()[mistake["by"]](self)
        path = serve_file(self.folder, self.args)
        if "text" in mistake:
            path.write_text(mistake["text"])
        return path, mistake["told"]

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
    for section in (user.http, user.args["grpc"], user.args["dashboard"]):
        section["port"] = user.take()


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


def recurrent(user: Beginner) -> None:
    user.engine["model"] = str(user.checkpoint("mamba"))


MISTAKES = yaml.safe_load(Path(__file__).with_name("first_hour.yaml").read_text("utf-8"))


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


# What only a start needs: a free port, a token for Ray, and models that are fetched.
OF_A_START = ("taken ports", "open to all", "no network")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_by_serve_and_check_in_one_line_with_its_remedy(
    name: str, user: Beginner, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    file, told = user.make(name)
    capsys.readouterr()  # what the preparation has said
    for verb in ("serve",) if name in OF_A_START else by_day(("serve",), ("serve", "check")):
        check_told(run(verb, file, status=2), told)


def check_told(said: str, told: list[str]) -> None:
    (line,) = (each for each in said.splitlines() if not each.startswith(PROGRESS))
    assert line.startswith("drafthouse: ")
    assert all(part in line for part in told)
    assert len(line) < 700


# What a start says before it looks at what is wrong.
PROGRESS = ("drafthouse: getting ", "drafthouse: checking the models")


def test_the_command_itself_says_one_line_and_ends_with_status_two(user: Beginner) -> None:
    file, told = user.make("wrong tokenizer")
    done = python("-m", "deployments.cli", "serve", file, RAY_AUTH_MODE="token")
    assert (done.returncode, done.stdout) == (2, "")
    check_told(done.stderr, told)
