"""A model judges another drafter's tree in one pass: it keeps what is among its own candidates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.core import Proposal, TokenTree
from cluster.draft.lm import LMDrafter
from cluster.engine.engine import Engine
from cluster.spec.token_log import prefix_hash
from tests.support.draft.author import (
    GREEDY,
    Author,
    draft_engine,
    grow,
    lm_drafter,
    target_text,
    write,
)
from tests.support.engine.integrity import check_integrity

VOCAB = 288
PROMPT = np.random.default_rng(7).integers(4, VOCAB, 21).tolist()


def proposal_of(author: Author, tree: TokenTree) -> Proposal:
    tokens = author.tokens
    survival = np.full(len(tree), 0.1, np.float32)
    return Proposal("a", 1, len(tokens), prefix_hash(tokens), tree, survival, "other")


@pytest.mark.parametrize("natively", [True, False], ids=["natively", "in steps"])
def test_one_pass_judges_a_whole_path(exact_engine: Engine, *, natively: bool) -> None:
    text = target_text(exact_engine, PROMPT, GREEDY, 8).tolist()
    drafter, author = lm_drafter(exact_engine, min_survival=1e-9), Author(PROMPT)
    drafter._rules = drafter._rules if natively else None
    drafter.observe([author.opening()])
    wrong = (text[3] + 1) % VOCAB
    path = TokenTree.chain([*text[:3], wrong, 5])
    drafter.graft([proposal_of(author, path)])
    request = drafter._requests.find("a")
    assert len(request.graft)
    before = exact_engine.last_step
    while request.tree is None:
        drafter.propose([author.task()])
    assert exact_engine.last_step is not before
    tree = request.tree
    assert len(tree.walk(text[:4])) == 4, "the graft's nodes have children of the model's own"
    assert all(node.ranking is not None for node in tree.walk(text[:3]))
    drafter.graft([proposal_of(author, path)])
    assert not len(request.graft), "it goes on with its own tree"
    assert_is_the_tree_of_a_fresh_drafter(drafter, exact_engine, author, text[:3])
    check_integrity(exact_engine)
    drafter.release(["a"])
    assert exact_engine.pages_in_use == 0


def assert_is_the_tree_of_a_fresh_drafter(
    drafter: LMDrafter, engine: Engine, author: Author, path: list[int]
) -> None:
    """Every node has the ranking that the model gives after its path, grafted or not."""
    grow(drafter, author)
    request = drafter._requests.find("a")
    for length in range(len(path) + 1):
        plain = Author([*author.tokens, *path[:length]], request_id="plain")
        other = lm_drafter(engine)
        write(other, plain, [])
        expected = other._requests.find("plain")
        own = [request.tree.root, *request.tree.walk(path[:length])][-1].ranking
        root = expected.tree.root.ranking
        np.testing.assert_allclose(own.scores[:8], root.scores[:8], atol=1e-4)
        other.release(["plain"])


def test_drafting_goes_on_after_a_graft_that_the_model_rejects(exact_engine: Engine) -> None:
    drafter = lm_drafter(exact_engine, num_candidates=4, num_children=2)
    author = Author(PROMPT)
    drafter.observe([author.opening()])
    drafter.graft([proposal_of(author, TokenTree.chain([VOCAB - 1, 7, 8]))])
    rejected = grow(drafter, author)["a"]
    fresh, twin = lm_drafter(exact_engine, num_candidates=4, num_children=2), Author(PROMPT)
    twin.request_id = "b"
    expected = write(fresh, twin, [])
    assert rejected.tree.token_ids.tolist() == expected.tree.token_ids.tolist()
    text = target_text(exact_engine, PROMPT, GREEDY, 3).tolist()
    assert write(drafter, author, text) is not None
    check_integrity(exact_engine)
    for each, name in ((drafter, "a"), (fresh, "b")):
        each.release([name])


def test_a_graft_for_a_text_that_has_changed_since_is_forgotten(llama_folder: Path) -> None:
    engine = draft_engine(llama_folder, max_batch_tokens=16)
    drafter, author = lm_drafter(engine), Author(PROMPT * 2)
    drafter.observe([author.opening()])
    graft = proposal_of(author, TokenTree.chain([5, 6, 7]))
    drafter.graft([graft])
    drafter.propose([author.task()])  # the first chunk of the prompt, with the graft behind it
    drafter.observe([author.commit([5])])
    drafter.graft([replace(graft, base_len=1)])
    proposal = grow(drafter, author)["a"]
    assert (proposal.base_len, len(proposal.tree) > 0) == (len(author.tokens), True)
    assert engine.context_ids("a").tolist() == author.tokens
    check_integrity(engine)
