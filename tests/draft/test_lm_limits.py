"""The limits of the LM drafter: context, vocabulary, pages, number of nodes; and drafts that it
draws for texts under the textbook's laws, with the laws they came from."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config.schema import EngineConfig
from cluster.core import EMPTY_TREE, SamplingParams
from cluster.draft.base import DrafterContext, told_params
from cluster.draft.lm import LMDrafter
from cluster.draft.lm_request import window_start
from cluster.draft.options import LMOptions
from cluster.engine.engine import Engine
from cluster.requests.fields import LAWS, NO_LAWS, Law
from cluster.spec.tree import children, walk
from cluster.worker.verifier import Verifier
from tests.support.draft.author import (
    GREEDY,
    NATIVELY,
    PROMPT,
    VOCAB,
    Author,
    draft_engine,
    grow,
    lm_drafter,
    target_text,
    write,
)
from tests.support.engine.integrity import check_integrity
from tests.support.errors import config_error
from tests.support.worker.rounds import Session


@NATIVELY
def test_a_full_window_drops_its_older_half_and_drafting_goes_on(
    llama_folder: Path, natively: bool
):
    engine = draft_engine(llama_folder, max_context_len=32)
    drafter = lm_drafter(engine, max_nodes=24, natively=natively, min_survival=1e-9)
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
    assert drafter._requests.find("a").pending == "text"
    proposal = write(drafter, author, PROMPT)
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
    grow(drafter, authors[3])
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
    with config_error("use a draft model with the", "drafters.lm.options.engine.model"):
        LMDrafter(dataclasses.replace(same, tokenizer_hash="another"), options)
    with config_error("vocabulary has 288 tokens, the target's 300"):
        LMDrafter(DrafterContext("lm", 8, 8, 300), options)


@pytest.mark.parametrize(("asked", "bound"), [(2, 4), (3, 6), (4, 7), (20, 7)])
def test_expanded_nodes_grow_to_twice_the_task_within_the_maximum(
    exact_engine: Engine, asked: int, bound: int
):
    drafter = lm_drafter(exact_engine, max_nodes=7, min_survival=1e-9, width=3)
    author = Author(PROMPT, max_nodes=asked)
    assert len(write(drafter, author, []).tree) == min(asked, 7)
    assert len(drafter._requests.find("a").tree.expanded) == bound
    drafter.release(["a"])


def test_sampling_at_the_end_of_a_text_is_not_drafted(exact_engine: Engine):
    params = SamplingParams(temperature=0.0, max_tokens=3)
    drafter, author = lm_drafter(exact_engine, min_survival=1e-9), Author(PROMPT, params)
    proposal = write(drafter, author, [])
    assert len(walk(proposal.tree, target_text(exact_engine, PROMPT, params, 3))) <= 2
    assert set(proposal.tree.parents.tolist()) != {-1}
    assert write(drafter, author, [5, 6]) is None
    drafter.release(["a"])


# Drawn drafts.

SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=60)
RATIO_LAWS = pytest.mark.parametrize("law", LAWS[1:])
OPTIONS = {
    "temperature 0.8": dataclasses.replace(SAMPLED, temperature=0.8),
    "top-k, top-p": dataclasses.replace(SAMPLED, top_k=40, top_p=0.9),
    "bias": dataclasses.replace(SAMPLED, logit_bias=((17, 4.0), (30, -100.0))),
    "penalties": dataclasses.replace(SAMPLED, presence_penalty=0.5, repetition_penalty=1.2),
    "stop tokens": dataclasses.replace(SAMPLED, stop_token_ids=tuple(range(0, VOCAB, 2))),
}


@RATIO_LAWS
def test_the_shape_follows_from_the_law_alone(noisy_engine: Engine, law: Law):
    drafter = lm_drafter(noisy_engine)
    params = told_params(dataclasses.replace(SAMPLED, law=law), is_believed=True)
    proposal = write(drafter, Author(PROMPT, params, max_nodes=8), [])
    drafter.release(["a"])
    # By the claims before any outcome, a second sibling is worth more than the third of a chain.
    widths = [len(own) for own in children(proposal.tree.parents) if own]
    assert widths == ([2, *[1] * 6] if law == "multi_step" else [1] * 8)
    assert set(proposal.laws) == set(proposal.tree.parents.tolist())
    for parent, own in enumerate(children(proposal.tree.parents), start=-1):
        if own:
            drawn = proposal.laws[parent]
            assert len(drawn.token_ids) == 32
            assert drawn.probs.sum() == pytest.approx(1.0)
            assert set(proposal.tree.token_ids[own].tolist()) <= set(drawn.token_ids.tolist())


@RATIO_LAWS
@pytest.mark.parametrize("name", OPTIONS)
def test_a_target_accepts_every_draft_of_its_own_model(exact_engine: Engine, law: Law, name: str):
    params = dataclasses.replace(OPTIONS[name], law=law)
    drafter = lm_drafter(exact_engine, num_candidates=VOCAB, drawn_children=(1,))
    verifier = Verifier(exact_engine)
    author = Author(PROMPT, told_params(params, is_believed=True), max_nodes=4)
    session, num_drafts = Session("target", PROMPT, params), 0
    write(drafter, author, [])
    for _ in range(4):
        proposal = write(drafter, author, session.tokens[len(author.tokens) :])
        tree = EMPTY_TREE if proposal is None else proposal.tree
        session.record.laws = NO_LAWS if proposal is None else proposal.laws
        assert not verifier.submit([session.item(tree)])
        verdicts = ()
        while not verdicts:
            verdicts = verifier.step().verdicts
        assert len(verdicts[0].path) == len(tree)
        session.take(verdicts[0])
        num_drafts += len(tree)
    verifier.release(["target"])
    drafter.release(["a"])
    assert num_drafts >= 8


def test_drawn_drafts_are_kept_behind_a_commit(noisy_engine: Engine):
    drafter = lm_drafter(noisy_engine)
    params = told_params(dataclasses.replace(SAMPLED, law="rejection"), is_believed=True)
    author = Author(PROMPT, params, max_nodes=6)
    first = write(drafter, author, [])
    second = write(drafter, author, first.tree.token_ids[:2].tolist())
    drafter.release(["a"])
    assert second.tree.token_ids[:3].tolist() == first.tree.token_ids[2:5].tolist()


def test_a_drafter_that_is_not_believed_is_asked_for_the_likeliest_tokens():
    params = dataclasses.replace(SAMPLED, law="rejection")

    told = told_params(params, is_believed=False)

    assert (told.temperature, told.law, told.seed) == (0.0, "coupled", None)
    assert told_params(params, is_believed=True).seed not in (params.seed, None)
    assert told_params(SAMPLED, is_believed=False) is SAMPLED
