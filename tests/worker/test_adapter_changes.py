"""A request keeps the adapter that it began with, also where another owner goes on with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.schema import Config, EngineConfig, TargetConfig
from cluster.core import SamplingParams
from cluster.engine.engine import Engine
from cluster.errors import ConfigError, NotFoundError
from cluster.rpc.messages import AdapterList, WorkerDescription
from cluster.worker.models import check_successor
from cluster.worker.target import TargetWorker
from cluster.worker.verifier import Verifier
from tests.support.engine.adapters import merged_oracle, write_adapter
from tests.support.engine.driver import generate, load_engine, prompt
from tests.support.worker.rounds import Session
from tests.support.worker.stage import NOBODY, parts_around

GREEDY = SamplingParams(temperature=0.0)
PROMPT = prompt(9).tolist()
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folders(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "old": write_adapter(llama_folder, root / "old", seed=1),
        "new": write_adapter(llama_folder, root / "new", seed=2),
        "misfit": write_adapter(llama_folder, root / "misfit", rank=80),
    }


@pytest.fixture
def engine(llama_folder: Path, folders: dict[str, Path]) -> Engine:
    return load_engine(llama_folder, adapters={"a": str(folders["old"])})


def change(engine: Engine, llama_folder: Path, **folders: Path) -> AdapterList:
    config = Config(
        target=TargetConfig(engine=EngineConfig(model=str(llama_folder))), model_name="m"
    )
    named = {name: str(folder) for name, folder in folders.items()}
    worker, told = TargetWorker(parts_around(engine), config, NOBODY), []
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


def text_with(llama_folder: Path, folder: Path) -> list[int]:
    return generate(merged_oracle(llama_folder, folder), PROMPT, NUM_TOKENS)


def test_the_next_owner_of_a_request_goes_on_with_its_adapter(
    llama_folder: Path, folders: dict[str, Path], engine: Engine
):
    verifier = Verifier(engine)
    (asked,) = engine.adapters.references
    first = Session("x", PROMPT, GREEDY, adapter=asked)
    go_on(verifier, first, 4)
    told = change(engine, llama_folder, a=folders["new"])
    assert told.served == engine.adapters.references != (asked,)
    assert told.refused == ""
    verifier.release(["x"])  # in the same frame as the second
    second = Session("x", PROMPT, GREEDY, generation=1, written=first.output, adapter=asked)
    assert go_on(verifier, second, NUM_TOKENS) == text_with(llama_folder, folders["old"])
    other = Session("y", PROMPT, GREEDY, adapter=told.served[0])
    assert go_on(verifier, other, NUM_TOKENS) == text_with(llama_folder, folders["new"])


def test_what_was_dropped_and_freed_is_refused_with_the_reason(
    llama_folder: Path, folders: dict[str, Path], engine: Engine
):
    verifier = Verifier(engine)
    (asked,) = engine.adapters.references
    session = Session("x", PROMPT, GREEDY, adapter=asked)
    go_on(verifier, session, 4)
    change(engine, llama_folder, a=folders["new"])
    verifier.release(["x"])
    assert verifier.pages[0] == 0
    for adapter, reason in ((asked, "'a' has been replaced"), ("b", "no adapter 'b'")):
        fresh = Session("x", PROMPT, GREEDY, adapter=adapter)
        refused = verifier.submit([fresh.item()])
        assert isinstance(refused["x"], NotFoundError)
        assert reason in refused["x"].message


def test_a_list_that_cannot_be_served_changes_nothing_and_says_why(
    llama_folder: Path, folders: dict[str, Path], engine: Engine
):
    before = engine.adapters
    told = change(engine, llama_folder, b=folders["new"], c=folders["misfit"])
    assert engine.adapters is before
    assert told.served == before.references
    assert "adapter 'c' cannot be served" in told.refused
    engine.model.adapters.serve = None  # as where a library raises, for want of memory
    assert "TypeError" in change(engine, llama_folder).refused


# What is checked of a drafter's other model before it takes the place of the one that drafts.


FORMER = WorkerDescription("w", "drafter", "lm", tokenizer_hash="a" * 64, vocab_size=100)


@pytest.mark.parametrize(
    ("tokenizer_hash", "vocab_size", "fits"),
    [
        ("a" * 64, 100, True),
        ("a" * 64, 104, True),  # padded
        ("b" * 64, 100, False),
        ("", 100, True),
        ("", 104, False),
        ("", 0, True),  # a look-up, which reads any
    ],
)
def test_a_drafter_of_the_pool_goes_on_in_the_vocabulary_of_the_one_before(
    tokenizer_hash: str, vocab_size: int, fits: bool
):
    later = replace(FORMER, tokenizer_hash=tokenizer_hash, vocab_size=vocab_size)
    if fits:
        check_successor(FORMER, later)
        return
    with pytest.raises(ConfigError, match=r"drafters\.lm\.options: .* use one with the target's"):
        check_successor(FORMER, later)
