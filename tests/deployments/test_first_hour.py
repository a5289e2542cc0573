"""Mistakes of the first hour: one line that says what to do, status 2, and before Ray starts."""

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
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
from tests.deployments.test_doors import environment
from tests.support.choices import by_day
from tests.support.deployments.command import FACES, on_free_ports
from tests.support.models.wheels import look_only_in

__all__ = ["environment"]

MISTAKES = yaml.safe_load(Path(__file__).with_name("first_hour.yaml").read_text("utf-8"))


@dataclass
class Beginner:
    """A configuration that works, and the places where its owner makes mistakes."""

    folder: Path
    model: Path
    checkpoint: Callable[..., Path]
    environment: pytest.MonkeyPatch
    stack: ExitStack
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.args = {
            "target": {"engine": {"model": str(self.model), "device": "cpu", "threads": 1}},
            "drafters": {"lookup": {"kind": "prompt_lookup"}},
            **on_free_ports(),
        }

    def make(self, name: str) -> tuple[Path, list[str]]:
        """The file with the mistake of that name, and what must be said of it."""
        mistake = MISTAKES[name]
        for key, value in mistake.get("env", {}).items():
            self.environment.setenv(key, value)
        for key, value in mistake.get("set", {}).items():
            change(self.args, key, value)
        for key, (architecture, options) in mistake.get("models", {}).items():
            change(self.args, key, str(self.checkpoint(architecture, **options)))
        for module, source in mistake.get("module", {}).items():
            (self.folder / f"{module}.py").write_text(source)
            self.args["drafters"]["own"] = {"kind": f"{module}:Own"}
        if mistake.keys() & {"files", "config"}:
            self.copy(mistake.get("files", {}), mistake.get("config", {}))
        if "by" in mistake:
            globals()[mistake["by"]](self)
        path = serve_file(self.folder, self.args)
        if "text" in mistake:
            path.write_text(mistake["text"])
        return path, mistake["told"]

    def copy(self, files: dict[str, str | None], config: dict[str, Any]) -> None:
        """Let the target be a copy of the model with these changes."""
        copy = shutil.copytree(self.model, self.folder / "copy")
        change(self.args, "target.engine.model", str(copy))
        described = copy / "config.json"
        described.write_text(json.dumps(json.loads(described.read_text()) | config))
        for name, text in files.items():
            for file in copy.glob(name):
                file.unlink()
            if text is not None:
                (copy / name).write_text(text)


def taken_ports(user: Beginner) -> None:
    for face in FACES:
        taken = user.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        user.args[face]["port"] = taken.getsockname()[1]


def one_port_for_two(user: Beginner) -> None:
    user.args["grpc"] = dict(user.args["http"])


def offline(user: Beginner) -> None:
    change(user.args, "target.engine.model", "smollm2-135m-instruct")
    user.environment.setenv("DRAFTHOUSE_MODELS", str(user.folder / "cache"))
    look_only_in(user.folder, user.environment)


@pytest.fixture
def user(
    tmp_path: Path,
    llama_folder: Path,
    checkpoint_factory: Callable[..., Path],
    environment: pytest.MonkeyPatch,
) -> Iterator[Beginner]:
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
):
    file, told = user.make(name)
    capsys.readouterr()  # what the preparation has said
    for verb in ("serve",) if name in OF_A_START else by_day(("serve",), ("serve", "check")):
        check_told(run(verb, file, status=2), told)


# What a start says before it looks at what is wrong.
PROGRESS = ("drafthouse: getting ", "drafthouse: checking the models")


def check_told(said: str, told: list[str]) -> None:
    (line,) = (each for each in said.splitlines() if not each.startswith(PROGRESS))
    assert line.startswith("drafthouse: ")
    assert all(part in line for part in told)
    assert len(line) < 700


def test_the_command_itself_says_one_line_and_ends_with_status_two(user: Beginner):
    file, told = user.make("wrong tokenizer")
    done = python("-m", "deployments.cli", "serve", file, RAY_AUTH_MODE="token")
    assert (done.returncode, done.stdout) == (2, "")
    check_told(done.stderr, told)
