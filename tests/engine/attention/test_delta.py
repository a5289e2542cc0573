"""Delta layers: no wrong state is served, none is lost, and the next text finds what was kept."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cluster.core import TokenTree
from cluster.engine.attention import seam
from cluster.engine.attention.delta_rule import Piece, delta_rule
from cluster.engine.work import Work
from cluster.errors import ConfigError
from tests.support.choices import pairwise
from tests.support.engine.driver import (
    PAGE_SIZE,
    Factory,
    check_near,
    check_rows,
    load_engine,
    load_oracle,
    prompt,
    run,
)
from tests.support.engine.integrity import check_integrity

TREE = TokenTree.of([5, 6, 7, 8, 9], [-1, 0, 0, 2, -1])


def _of_no_text(lines: Any, states: Any, pieces: list[Piece], *rows: torch.Tensor) -> torch.Tensor:
    """Each state is taken for that of a text's beginning."""
    for piece in pieces:
        piece.states.zero_()
    return delta_rule(lines, states, pieces, *rows)


def _of_the_border_before(
    lines: Any, states: Any, pieces: list[Piece], *rows: torch.Tensor
) -> torch.Tensor:
    """What is written at a border is what was there before, as where a write is lost."""
    former = states.clone()
    found = delta_rule(lines, states, pieces, *rows)
    states.copy_(former)
    return found


@pairwise(
    architecture=["qwen3.5", "qwen3-next"],
    wrong=[_of_no_text, _of_the_border_before],
    page_size=[PAGE_SIZE, 16],
)
def test_wrong_states_of_delta_layers_are_found_at_load(
    architecture: str,
    wrong: Callable[..., torch.Tensor],
    page_size: int,
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(seam, "delta_rule", wrong)
    with pytest.raises(ConfigError, match="logits are off by"):
        load_engine(checkpoint_factory(architecture), page_size=page_size)


def test_a_failed_step_leaves_no_state_behind(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
):
    """A smaller one follows, which reaches no border."""
    folder = checkpoint_factory("qwen3.5")
    engine, oracle, text = load_engine(folder), load_oracle(folder), prompt(30)
    run(engine, Work("a", 0, text[:6]))

    def fail(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as failing:
        failing.setattr(seam, "delta_rule", fail)
        engine.submit(Work("a", 6, text[6:20]))
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
    check_integrity(engine)
    sequence = engine.page_owners.sequences["a"]
    assert sequence.border == 4
    assert sequence.spare
    engine.step(prompt_rows=1)
    assert sequence.border == 4
    while engine.has_pending:
        engine.step()
    check_rows(run(engine, Work("a", 20, text[20:], TREE)), oracle, text, TREE)


def test_who_shares_half_of_a_prompt_keeps_its_state_for_the_next(
    checkpoint_factory: Factory,
):
    folder = checkpoint_factory("qwen3.5")
    engine, oracle = load_engine(folder, max_batch_tokens=256), load_oracle(folder)
    hits = []
    for name in "abc":
        text = np.concatenate((prompt(150), prompt(90, seed=ord(name))))
        engine.submit(Work(name, 0, text, TREE))
        found, hit = [], 0
        while engine.has_pending:
            found += engine.step()
            hit += engine.last_step.num_prefix_hit_tokens
        hits.append(hit)
        # transformers cuts such a text elsewhere: 2.6e-5 was seen.
        check_rows(found[-1], oracle, text, TREE, bound=5e-5)
    assert hits == [0, 0, 148]


def test_narrow_formats_keep_states_in_float32(checkpoint_factory: Factory):
    folder = checkpoint_factory("qwen3.5", init_std=0.05)
    wide = load_engine(folder)
    narrow = load_engine(folder, dtype="bfloat16", attention="sdpa")
    check_near(narrow, wide)
    assert {each.dtype for each in narrow.cache.states.values()} == {torch.float32}


def test_what_its_rows_compute_together_is_not_reproducible(checkpoint_factory: Factory):
    with pytest.raises(ConfigError, match="compute a text's rows together"):
        load_engine(checkpoint_factory("qwen3.5"), reproducible=True)
