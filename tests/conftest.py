"""Fixtures every package's tests share: tiny checkpoints, written once per session."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, settings

from cluster.draft import breaker
from tests.support.checkpoints import noisy_copy, tiny_checkpoint

# Runs a command, a word for each argument; `status` is what is expected of it.
Run = Callable[..., str]
REPOSITORY = Path(__file__).resolve().parents[1]

# A busy machine is no failure: examples take as long as they take.  The parent is Hypothesis's own
# profile where `CI` is set: equal sources meet equal examples there.
settings.register_profile(
    "patient",
    settings.get_profile(settings.get_current_profile_name()),
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("patient")
# `make test-nightly` asks for more of what differs between runs.
settings.register_profile("nightly", settings.get_profile("patient"), max_examples=1000)
# `make mutation` asks one question per mutant, does any test fail, and the same way each time.
settings.register_profile(
    "mutation",
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    deadline=None,
)


def pytest_configure() -> None:
    """One thread for torch, here and in the processes that tests start.

    It is fastest for tensors this small.  OpenMP's threads also spin while they wait for each
    other: where several workers of pytest share the cores, an expert's product of microseconds
    then lasts a time slice, and a test of seconds minutes.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint_factory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint_factory("llama", seed=1)`: the folder of that checkpoint, made on first use."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[object, ...], Path] = {}

    def factory(architecture: str, **options: object) -> Path:
        key = (architecture, *sorted((name, repr(value)) for name, value in options.items()))
        if key not in made:
            made[key] = tiny_checkpoint(
                architecture, root / f"{architecture}-{len(made)}", **options
            )
        return made[key]

    return factory


def python(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, at the root of the repository."""
    return command(sys.executable, *words, **environment)


def said_by(*words: object, folder: Path = REPOSITORY, **environment: str) -> str:
    """What a command prints that succeeds."""
    done = command(*words, folder=folder, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(
    *words: object, folder: Path = REPOSITORY, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in a folder."""
    return subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def serve_file(folder: Path, arguments: Mapping[str, Any], **application: Any) -> Path:
    """A configuration file in `folder`, of one application with these `args`."""
    path = folder / "serve.yaml"
    application = {"import_path": "deployments.app:build", "args": arguments, **application}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`drafthouse` in this process: what it prints, or what it says where it fails."""
    from deployments.cli import main

    def run(*words: object, status: int = 0) -> str:
        found, said = main([*map(str, words)]), capsys.readouterr()
        assert found == status, said.err
        assert not (status and said.out)
        return said.err if status else said.out

    return run


@pytest.fixture(scope="module")
def tireless_residents() -> Iterator[None]:
    """Residents whose calls stall do not rest.

    Several workers of pytest share the cores, so a call may last half a second; the drafter then
    rests for longer than a test lasts, and what the test says of its drafts holds of none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaker, "_STALL_SLACK_S", math.inf)
        yield


@pytest.fixture
def whole_lines(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Each warning of the log names what it is about."""
    yield
    assert not [each for each in caplog.get_records("call") if "None" in each.getMessage()]


@pytest.fixture(scope="session")
def llama_folder(checkpoint_factory: Callable[..., Path]) -> Path:
    """A tiny Llama: the target of most tests."""
    return checkpoint_factory("llama")


@pytest.fixture(scope="session")
def draft_folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that often agrees with `llama_folder`, and sometimes does not."""
    return noisy_copy(llama_folder, tmp_path_factory.mktemp("drafter") / "noisy")
