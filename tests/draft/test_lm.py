"""The LM drafter on the real engine and tiny checkpoints: what it grows, and what it judges."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay.along import Recording, replay
from cluster.core import Proposal, TokenTree, token_array
from cluster.draft.candidates import Sharpness
from cluster.draft.committed_text import by_key
from cluster.draft.lm import LMDrafter
from cluster.engine.engine import Engine
from cluster.spec.token_log import prefix_hash
from tests.support.choices import by_day
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


class Unlearning(Sharpness):
    """Never learns, so that two drafters' survivals can be compared."""

    def learn(self, scores: np.ndarray, rank: int | None) -> None:
        return


def unlearning(drafter: LMDrafter) -> LMDrafter:
    drafter._sharpness = by_key(lambda: [Unlearning()])
    return drafter


@pytest.mark.parametrize("prompt_len", [21, 9], ids=["in steps", "natively"])
def test_no_prefix_of_another_tenant_is_used(llama_folder: Path, prompt_len: int):
    engine = draft_engine(llama_folder)
    drafter = lm_drafter(engine)
    drafts = {}
    for name, tenant in (("first", b"a"), ("other", b"b"), ("own", b"a")):
        author = Author(PROMPT[:prompt_len], request_id=name, tenant=tenant)
        drafts[name] = write(drafter, author, [])
        drafts[name, "pages"] = {
            entry.pages[0] for entry in engine.page_owners.sequences[name].shared
        }
    assert drafts["first", "pages"]
    assert not drafts["first", "pages"] & drafts["other", "pages"]
    assert_same_proposal(drafts["first"], drafts["other"])


def assert_same_proposal(left: Proposal | None, right: Proposal | None) -> None:
    assert (left.base_len, left.prefix_hash) == (right.base_len, right.prefix_hash)
    assert left.tree.token_ids.tolist() == right.tree.token_ids.tolist()
    assert left.tree.parents.tolist() == right.tree.parents.tolist()
    np.testing.assert_allclose(left.survival, right.survival, rtol=1e-4)


LAWS = {
    "greedy": GREEDY,
    "temperature 0.8": dataclasses.replace(GREEDY, temperature=0.8, seed=11),
    "temperature 1": dataclasses.replace(GREEDY, temperature=1.0, seed=2**63 + 5, stream=1),
    "top-k, top-p, min-p": dataclasses.replace(
        GREEDY, temperature=1.0, seed=3, top_k=40, top_p=0.9, min_p=0.01
    ),
    "bias": dataclasses.replace(
        GREEDY, temperature=0.9, seed=4, logit_bias=((17, 4.0), (30, -100.0))
    ),
    "penalties": dataclasses.replace(
        GREEDY, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_targets_own_model_drafts_without_a_miss(exact_engine: Engine, name: str):
    params = dataclasses.replace(LAWS[name], max_tokens=40)
    text = target_text(exact_engine, PROMPT, params, 40)
    # With one child per node the tree is the chain of the drafter's own draws.
    chains = lm_drafter(exact_engine, num_candidates=VOCAB, num_children=1, min_survival=1e-6)
    stats = replay(chains, Recording(token_array(PROMPT), text, params), max_nodes=6)
    assert stats.num_accepted == stats.num_draft_tokens > 0
    assert stats.num_rounds < 15
    check_integrity(exact_engine)
    assert exact_engine.pages_in_use == 0


@pytest.mark.parametrize("name", by_day(["greedy", "temperature 1", "penalties"], LAWS))
def test_trees_of_a_disagreeing_model_are_accepted_in_part(
    exact_engine: Engine, noisy_engine: Engine, name: str
):
    params = dataclasses.replace(LAWS[name], max_tokens=60)
    text = target_text(exact_engine, PROMPT, params, 60)
    drafter = lm_drafter(noisy_engine, max_nodes=32, num_candidates=VOCAB)
    stats = replay(drafter, Recording(token_array(PROMPT), text, params), max_nodes=16)
    assert stats.mean_acceptance_length > 1.3
    check_integrity(noisy_engine)
    assert drafter.pages_in_use == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_rerooted_tree_is_the_tree_a_fresh_drafter_grows(
    exact_engine: Engine, noisy_engine: Engine, temperature: float
):
    params = dataclasses.replace(GREEDY, temperature=temperature, seed=2)
    text = target_text(exact_engine, PROMPT, params, 40).tolist()
    # Without a minimum survival and with enough nodes, the best few nodes do not depend on how
    # the tree was grown; fits that learn meanwhile would change the survivals.
    options = {"num_candidates": 64, "min_survival": 1e-9, "num_children": 3}
    veteran = unlearning(lm_drafter(noisy_engine, max_nodes=48, **options))
    author = Author(PROMPT, params, max_nodes=6)
    write(veteran, author, [])
    request, position, num_hits = veteran._requests.find("a"), 0, 0
    while position < 30:
        step = 1 + position % 3
        veteran.observe([author.commit(text[position : position + step])])
        num_hits += request.changed
        proposal = grow(veteran, author)["a"]
        position += step
        fresh = unlearning(lm_drafter(noisy_engine, max_nodes=48, **options))
        twin = Author(author.tokens, params, request_id="fresh", max_nodes=6)
        fresh.observe([dataclasses.replace(twin.opening(), prompt_len=len(PROMPT))])
        assert_same_proposal(proposal, grow(fresh, twin)["fresh"])
        fresh.release(["fresh"])
    assert num_hits > 0
    veteran.release(["a"])
    assert noisy_engine.pages_in_use == 0


def test_a_hit_is_proposed_at_once_without_a_forward_pass(exact_engine: Engine):
    params = dataclasses.replace(GREEDY, max_tokens=100)
    text = target_text(exact_engine, PROMPT, params, 3).tolist()
    drafter, author = lm_drafter(exact_engine, max_nodes=24), Author(PROMPT, params)
    write(drafter, author, [])
    drafter.observe([author.commit(text[:1])])
    before = exact_engine.last_step
    (proposal,) = drafter.propose([author.task()])
    assert exact_engine.last_step is before
    assert (proposal.base_len, len(proposal.tree) > 0) == (len(author.tokens), True)
    drafter.release(["a"])


def test_a_long_prompt_does_not_stall_another_request(llama_folder: Path):
    engine = draft_engine(llama_folder, max_batch_tokens=32)
    drafter = lm_drafter(engine, max_nodes=40, min_survival=1e-4)
    short, long = Author(PROMPT[:9]), Author(PROMPT * 15, request_id="b")
    drafter.observe([short.opening()])
    drafter.propose([short.task()])
    drafter.observe([long.opening()])
    request = drafter._requests.find("a")
    sizes = set()
    while True:
        proposals = {p.request_id: p for p in drafter.propose([short.task(), long.task()])}
        assert proposals, "both requests have work left"
        sizes.add(len(request.tree.expanded))
        if "b" in proposals and len(proposals["b"].tree):
            break
        assert "b" not in proposals or proposals["b"].base_len == len(long.tokens)
    assert len(sizes) > 3, "the short request's tree grew while the long prompt was read"
    assert len(grow(drafter, long)["b"].tree) > 0


def test_commits_that_arrive_during_a_prefill_are_not_lost(llama_folder: Path):
    engine = draft_engine(llama_folder, max_batch_tokens=16)
    drafter, author = unlearning(lm_drafter(engine)), Author(PROMPT * 4)
    drafter.observe([author.opening()])
    drafter.propose([author.task()])
    drafter.observe([author.commit([5, 6])])
    drafter.propose([author.task()])
    proposal = write(drafter, author, [7])
    assert_same_proposal(
        proposal,
        write(unlearning(lm_drafter(engine)), Author(author.tokens, request_id="fresh"), []),
    )


def test_a_rollback_during_a_prefill_is_applied(llama_folder: Path):
    engine = draft_engine(llama_folder, max_batch_tokens=16)
    drafter, author = lm_drafter(engine), Author(PROMPT * 4)
    drafter.observe([author.opening()])
    drafter.propose([author.task()])
    author.tokens = author.tokens[:30]
    drafter.observe([dataclasses.replace(author.commit([9, 9, 9]), prompt_len=10)])
    proposal = grow(drafter, author)["a"]
    assert proposal.base_len == 33
    assert engine.context_ids("a").tolist() == author.tokens
    check_integrity(engine)


def test_a_growing_tree_is_sent_again_only_after_a_sufficient_gain(exact_engine: Engine):
    drafter, author = lm_drafter(exact_engine), Author(PROMPT)
    drafter.observe([author.opening()])
    sent = []
    while proposals := drafter.propose([author.task()]):
        if len(proposals[0].tree) and (not sent or proposals[0] is not sent[-1]):
            sent.append(proposals[0])
    totals = [float(each.survival.sum()) for each in sent]
    assert all(later - sooner >= 0.1 for sooner, later in pairwise(totals[:-1]))
    request = drafter._requests.find("a")
    final = request.proposal(author.task().max_nodes, drafter._options.min_survival, "lm")
    assert final is sent[-1], "when growth has ended all of it is known"
    drafter.release(["a"])


# A model judges another drafter's tree in one pass: it keeps what is among its own candidates.


def proposal_of(author: Author, tree: TokenTree) -> Proposal:
    tokens = author.tokens
    survival = np.full(len(tree), 0.1, np.float32)
    return Proposal("a", 1, len(tokens), prefix_hash(tokens), tree, survival, "other")


@NATIVELY
def test_one_pass_judges_a_whole_path(exact_engine: Engine, natively: bool):
    text = target_text(exact_engine, PROMPT, GREEDY, 8).tolist()
    drafter = lm_drafter(exact_engine, natively=natively, min_survival=1e-9)
    author = Author(PROMPT)
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
        np.testing.assert_allclose(own.scores[:8], expected.tree.root.ranking.scores[:8], atol=1e-4)
        other.release(["plain"])


def test_drafting_goes_on_after_a_graft_that_the_model_rejects(exact_engine: Engine):
    drafter = lm_drafter(exact_engine, num_candidates=4, num_children=2)
    author = Author(PROMPT)
    drafter.observe([author.opening()])
    drafter.graft([proposal_of(author, TokenTree.chain([VOCAB - 1, 7, 8]))])
    rejected = grow(drafter, author)["a"]
    fresh = lm_drafter(exact_engine, num_candidates=4, num_children=2)
    expected = write(fresh, Author(PROMPT, request_id="b"), [])
    assert rejected.tree.token_ids.tolist() == expected.tree.token_ids.tolist()
    text = target_text(exact_engine, PROMPT, GREEDY, 3).tolist()
    assert write(drafter, author, text) is not None
    check_integrity(exact_engine)
    for each, name in ((drafter, "a"), (fresh, "b")):
        each.release([name])


def test_a_graft_for_a_text_that_has_changed_since_is_forgotten(llama_folder: Path):
    engine = draft_engine(llama_folder, max_batch_tokens=16)
    drafter, author = lm_drafter(engine), Author(PROMPT * 2)
    drafter.observe([author.opening()])
    graft = proposal_of(author, TokenTree.chain([5, 6, 7]))
    drafter.graft([graft])
    drafter.propose([author.task()])  # the first chunk of the prompt, with the graft behind it
    drafter.observe([author.commit([5])])
    drafter.graft([dataclasses.replace(graft, base_len=1)])
    proposal = grow(drafter, author)["a"]
    assert (proposal.base_len, len(proposal.tree) > 0) == (len(author.tokens), True)
    assert engine.context_ids("a").tolist() == author.tokens
    check_integrity(engine)
