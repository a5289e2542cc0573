"""What a work asks for beside its logits: the most probable tokens of its rows, an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core import TokenTree
from cluster.engine.engine import Engine, Work
from cluster.engine.memory.sequence import Sequence
from cluster.engine.schedule.batch import Pick, build_batch
from tests.support.engine.driver import load_engine, prompt, rows, run

TREE = TokenTree.of([5, 6, 7, 8], [-1, 0, 0, -1])


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> Engine:
    return load_engine(llama_folder)


def test_an_adapter_that_is_not_loaded_is_refused_and_costs_nobody_else(engine: Engine) -> None:
    engine.submit(Work("other", 0, prompt(6)))
    engine.submit(Work("bad", 0, prompt(9), TREE, adapter=2))
    outputs = {output.request_id: output for output in engine.step()}
    error = outputs["bad"].error
    assert error is not None
    with pytest.raises(type(error), match="adapter 2 is asked for, which is not loaded"):
        raise error
    rows(outputs["other"])
    rows(run(engine, Work("bad", 0, prompt(9), TREE)))
    engine.release("bad")
    engine.release("other")


def test_every_row_of_a_work_has_its_adapter() -> None:
    def pick(name: str, adapter: int) -> Pick:
        work = Work(name, 0, prompt(3), TREE, adapter=adapter)
        sequence = Sequence(name, 0, 16)
        sequence.tables[0].add(0)
        return Pick(sequence, work, 3, True)

    shape = {"min_rows": 16, "scratch_slot": 0, "max_context_len": 64}
    batch = build_batch([pick("a", 0), pick("b", 2)], **shape)
    assert batch.adapters is not None
    assert batch.adapters.tolist() == [0] * 7 + [2] * 7 + [0] * 2
    assert build_batch([pick("a", 0)], **shape).adapters is None
