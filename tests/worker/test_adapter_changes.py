"""A request keeps the adapter that it began with, also where another owner goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config.schema import Config, EngineConfig, TargetConfig
from cluster.core import SamplingParams
from cluster.engine.engine import Engine
from cluster.errors import NotFoundError
from cluster.messages import AdapterList
from cluster.worker.target import ConfiguredTarget
from cluster.worker.verifier import Verifier
from tests.support.engine.adapters import merged_oracle, write_adapter
from tests.support.engine.driver import generate, load_engine, prompt
from tests.support.worker.rounds import Session
from tests.support.worker.stage import NOBODY, parts_around

GREEDY = SamplingParams(temperature=0.0)
PROMPT = prompt(9)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def base(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("llama")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "old": write_adapter(base, root / "old", seed=1),
        "new": write_adapter(base, root / "new", seed=2),
        "misfit": write_adapter(base, root / "misfit", rank=80),
    }


@pytest.fixture
def engine(base: Path, folders: dict[str, Path]) -> Engine:
    return load_engine(base, adapters={"a": str(folders["old"])})


def change(engine: Engine, base: Path, **folders: Path) -> AdapterList:
    config = Config(target=TargetConfig(engine=EngineConfig(model=str(base))), model_name="m")
    named = {name: str(folder) for name, folder in folders.items()}
    worker, told = ConfiguredTarget(parts_around(engine), config, NOBODY), list[AdapterList]()
    worker.streams.announce = told.append  # type: ignore[method-assign]
    refused = worker.reconfigure(config, {"adapters": named})
    assert told[0].refused == refused
    return told[0]


def go_on(verifier: Verifier, session: Session, num_tokens: int) -> list[int]:
    while len(session.output) < num_tokens:
        assert verifier.submit([session.item()]) == {}
        (verdict,) = verifier.step().verdicts
        session.take(verdict)
    return session.output


def text_with(base: Path, folder: Path) -> list[int]:
    return generate(merged_oracle(base, folder), PROMPT, NUM_TOKENS)


def test_the_next_owner_of_a_request_goes_on_with_its_adapter(
    base: Path, folders: dict[str, Path], engine: Engine
) -> None:
    verifier = Verifier(engine)
    (asked,) = engine.adapters.references
    first = Session("x", PROMPT.tolist(), GREEDY, adapter=asked)
    go_on(verifier, first, 4)
    told = change(engine, base, a=folders["new"])
    assert told.served == engine.adapters.references != (asked,)
    assert told.refused == ""
    verifier.release(["x"])  # in the same frame as the second
    second = Session(
        "x", PROMPT.tolist(), GREEDY, generation=1, written=first.output, adapter=asked
    )
    assert go_on(verifier, second, NUM_TOKENS) == text_with(base, folders["old"])
    other = Session("y", PROMPT.tolist(), GREEDY, adapter=told.served[0])
    assert go_on(verifier, other, NUM_TOKENS) == text_with(base, folders["new"])


def test_what_was_dropped_and_freed_is_refused_with_the_reason(
    base: Path, folders: dict[str, Path], engine: Engine
) -> None:
    verifier = Verifier(engine)
    (asked,) = engine.adapters.references
    session = Session("x", PROMPT.tolist(), GREEDY, adapter=asked)
    go_on(verifier, session, 4)
    change(engine, base, a=folders["new"])
    verifier.release(["x"])
    assert verifier.pages[0] == 0
    for adapter, reason in ((asked, "'a' has been replaced"), ("b", "no adapter 'b'")):
        fresh = Session("x", PROMPT.tolist(), GREEDY, adapter=adapter)
        refused = verifier.submit([fresh.item()])
        assert isinstance(refused["x"], NotFoundError)
        assert reason in refused["x"].message


def test_a_list_that_cannot_be_served_changes_nothing_and_says_why(
    base: Path, folders: dict[str, Path], engine: Engine
) -> None:
    before = engine.adapters
    told = change(engine, base, b=folders["new"], c=folders["misfit"])
    assert engine.adapters is before
    assert told.served == before.references
    assert "adapter 'c' cannot be served" in told.refused
