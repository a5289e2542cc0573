"""The compiled forward: the same logits, and plain serving where it cannot be compiled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core import TokenTree
from cluster.engine.engine import Work
from cluster.errors import ConfigError
from tests.support.engine.driver import load_engine, prompt, rows, run


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_forward_gives_the_same_logits_for_prompts_trees_and_batches(
    two_layers: Path,
) -> None:
    plain, compiled = load_engine(two_layers), load_engine(two_layers, compile=True)
    assert compiled.model.compiled is not None
    assert not compiled.model.compiled.has_failed
    tree = TokenTree.of([3, 4, 5, 6], [-1, -1, 0, 2])
    works = [
        Work("a", 0, prompt(100)),  # two chunks
        Work("a", 100, prompt(1), tree),
        Work("b", 0, prompt(7)),
        Work("b", 7, prompt(1)),
    ]
    for work in works:
        expected, found = rows(run(plain, work)), rows(run(compiled, work))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_a_model_that_cannot_be_compiled_is_served_as_it_is(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(forward: Any, **_: Any) -> Any:
        def fail(**_: Any) -> Any:
            raise RuntimeError("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", refuse)
    engine = load_engine(llama_folder, compile=True)
    expected = rows(run(load_engine(llama_folder), Work("a", 0, prompt(9))))
    torch.testing.assert_close(rows(run(engine, Work("a", 0, prompt(9)))), expected)


def test_compile_beside_a_device_map_is_refused_by_name(llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match="one process on a CPU") as caught:
        load_engine(llama_folder, compile=True, device_map="auto")
    assert caught.value.param == "compile"
