"""Fixtures every package's tests share: tiny checkpoints, written once per session."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

from cluster.draft import breaker
from tests.support.checkpoints import noisy_copy, tiny_checkpoint

# A busy machine is no failure: examples take as long as they take.  The parent is Hypothesis's own
# profile where `CI` is set: equal sources meet equal examples there.
settings.register_profile(
    "patient", settings.get_profile(settings.get_current_profile_name()), deadline=None
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


@pytest.fixture(scope="module")
def tireless_residents() -> Iterator[None]:
    """Residents whose calls stall do not rest.

    Several workers of pytest share the cores, so a call may last half a second; the drafter then
    rests for longer than a test lasts, and what the test says of its drafts holds of none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaker, "_STALL_SLACK_S", math.inf)
        yield


@pytest.fixture(scope="session")
def llama_folder(checkpoint_factory: Callable[..., Path]) -> Path:
    """A tiny Llama: the target of most tests."""
    return checkpoint_factory("llama")


@pytest.fixture(scope="session")
def draft_folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that often agrees with `llama_folder`, and sometimes does not."""
    return noisy_copy(llama_folder, tmp_path_factory.mktemp("drafter") / "noisy")
