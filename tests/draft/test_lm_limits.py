"""The limits of the LM drafter: context, vocabulary, pages, number of nodes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cluster.config.schema import EngineConfig
from cluster.core import SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.lm import LMDrafter
from cluster.draft.lm_request import window_start
from cluster.draft.options import LMOptions
from cluster.engine.engine import Engine
from cluster.errors import ConfigError
from cluster.spec.tree import walk
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


@pytest.mark.parametrize("natively", [True, False], ids=["natively", "in steps"])
def test_a_full_window_drops_its_older_half_and_drafting_goes_on(
    llama_folder: Path, natively: bool
):
    engine = draft_engine(llama_folder, max_context_len=32)
    drafter = lm_drafter(engine, max_nodes=24, min_survival=1e-9)
    drafter._rules = drafter._rules if natively else None
    author = Author(PROMPT[:20])
    drafter.observe([author.opening()])
    starts = set()
    for token in range(20, 90):
        proposal = write(drafter, author, [token])
        assert proposal is not None, "a child of the last token needs no place in the cache"
        assert (proposal.base_len, len(proposal.tree) > 0) == (len(author.tokens), True)
        request = drafter._requests.find("a")
        start = window_start(len(author.tokens), 32)
        assert engine.context_ids("a").tolist() == author.tokens[start:]
        deepest = max((node.depth for node in request.tree.expanded), default=0)
        assert len(author.tokens) - start + deepest <= 32
        starts.add(start)
    assert starts == {0, 16, 32, 48, 64}
    drafter.release(["a"])
    check_integrity(engine)
    assert engine.pages_in_use == 0


def test_a_drafter_with_a_window_drafts_as_one_that_knows_the_window_alone(
    exact_engine: Engine, noisy_engine: Engine
):
    text = target_text(exact_engine, PROMPT, GREEDY, 60).tolist()
    drafter = lm_drafter(noisy_engine, context_window=24)
    author = Author(PROMPT)
    write(drafter, author, [])
    for position in range(0, 60, 2):
        proposal = write(drafter, author, text[position : position + 2])
        known = author.tokens[window_start(len(author.tokens), 24) :]
        fresh = lm_drafter(noisy_engine)
        expected = write(fresh, Author(known, request_id="fresh"), [])
        fresh.release(["fresh"])
        assert proposal.tree.token_ids[:1].tolist() == expected.tree.token_ids[:1].tolist()
    drafter.release(["a"])


def test_a_window_that_moves_while_the_engine_works_on_it_is_read_anew(llama_folder: Path):
    engine = draft_engine(llama_folder, max_batch_tokens=16)
    drafter, author = lm_drafter(engine, context_window=64), Author(PROMPT * 3)
    drafter.observe([author.opening()])
    drafter.propose([author.task()])
    request = drafter._requests.find("a")
    assert request.pending == "text"
    drafter.observe([author.commit(PROMPT)])
    proposal = grow(drafter, author)["a"]
    assert (proposal.base_len, len(proposal.tree) > 0) == (84, True)
    assert engine.context_ids("a").tolist() == author.tokens[32:]
    check_integrity(engine)


@pytest.mark.parametrize(("foreign", "read"), [(VOCAB, VOCAB - 1), (2**31 - 1, VOCAB - 1), (-1, 0)])
def test_a_token_outside_the_vocabulary_is_read_as_the_nearest(
    foreign: int, read: int, exact_engine: Engine
):
    drafter, found = lm_drafter(exact_engine), []
    for token in (foreign, read):
        proposal = write(drafter, Author([*PROMPT, token, 5]), [])
        drafter.release(["a"])
        found.append(proposal.tree.token_ids.tolist())
    assert found[0] == found[1] != []


def test_too_few_pages_only_reduce_the_trees(llama_folder: Path):
    engine = draft_engine(llama_folder, num_pages=20, page_size=4, prefix_cache=False)
    drafter = lm_drafter(engine, max_nodes=12)
    authors = [Author(PROMPT, request_id=name) for name in "abcd"]
    drafter.observe([author.opening() for author in authors])
    grow(drafter, *authors)
    for token in range(4, 30):
        commits = [author.commit([token]) for author in authors]
        for author, observation in zip(authors, drafter.observe(commits), strict=True):
            assert observation.have_len == len(author.tokens)
        for name, proposal in grow(drafter, *authors).items():
            assert proposal.base_len == len(authors["abcd".index(name)].tokens)
        check_integrity(engine)
    drafter.release(list("abc"))
    assert grow(drafter, authors[3]) is not None
    drafter.release(["d"])
    assert engine.pages_in_use == 0


def test_a_task_for_no_nodes_runs_no_forward_pass(exact_engine: Engine):
    drafter, author = lm_drafter(exact_engine), Author(PROMPT, max_nodes=0)
    drafter.observe([author.opening()])
    before = exact_engine.last_step
    assert grow(drafter, author) == {}
    assert exact_engine.last_step is before
    assert exact_engine.pages_in_use == 0


def test_another_vocabulary_is_refused_at_start(
    llama_folder: Path, checkpoint_factory: Callable[..., Path]
):
    options = LMOptions(engine=EngineConfig(model=str(llama_folder), device="cpu", num_pages=64))
    same = DrafterContext("lm", 8, 8, VOCAB, draft_engine(llama_folder).tokenizer_hash)
    LMDrafter(same, options)
    with pytest.raises(ConfigError, match="use a draft model with the") as caught:
        LMDrafter(dataclasses.replace(same, tokenizer_hash="another"), options)
    assert caught.value.param == "drafters.lm.options.engine.model"
    with pytest.raises(ConfigError, match="vocabulary has 288 tokens, the target's 300"):
        LMDrafter(DrafterContext("lm", 8, 8, 300), options)


@pytest.mark.parametrize(("asked", "bound"), [(2, 4), (3, 6), (4, 7), (20, 7)])
def test_expanded_nodes_grow_to_twice_the_task_within_the_maximum(
    exact_engine: Engine, asked: int, bound: int
):
    drafter = lm_drafter(exact_engine, max_nodes=7, min_survival=1e-9, width=3)
    author = Author(PROMPT, max_nodes=asked)
    proposal = write(drafter, author, [])
    assert len(proposal.tree) == min(asked, 7)
    request = drafter._requests.find("a")
    assert len(request.tree.expanded) == bound
    drafter.release(["a"])


def test_sampling_at_the_end_of_a_text_is_not_drafted(exact_engine: Engine):
    params = SamplingParams(temperature=0.0, max_tokens=3)
    drafter, author = lm_drafter(exact_engine, min_survival=1e-9), Author(PROMPT, params)
    proposal = write(drafter, author, [])
    assert len(walk(proposal.tree, target_text(exact_engine, PROMPT, params, 3))) <= 2
    assert set(proposal.tree.parents.tolist()) != {-1}
    assert write(drafter, author, [5, 6]) is None
    drafter.release(["a"])
