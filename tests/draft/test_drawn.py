"""Drafts that a model draws for texts under the textbook's laws, with the laws they came from."""

import dataclasses

import numpy as np
import pytest

from cluster.core import EMPTY_TREE, Proposal, SamplingParams
from cluster.draft.base import told_params
from cluster.engine.engine import Engine
from cluster.requests.fields import LAWS, NO_LAWS, Law
from cluster.spec.tree import children
from cluster.worker.verifier import Verifier
from tests.support.draft.author import Author, lm_drafter, write
from tests.support.worker.rounds import Session

VOCAB = 288
PROMPT = np.random.default_rng(7).integers(4, VOCAB, 21).tolist()
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=60)
RATIO_LAWS = pytest.mark.parametrize("law", LAWS[1:])
OPTIONS = {
    "temperature 0.8": dataclasses.replace(SAMPLED, temperature=0.8),
    "top-k, top-p": dataclasses.replace(SAMPLED, top_k=40, top_p=0.9),
    "bias": dataclasses.replace(SAMPLED, logit_bias=((17, 4.0), (30, -100.0))),
    "penalties": dataclasses.replace(SAMPLED, presence_penalty=0.5, repetition_penalty=1.2),
    "stop tokens": dataclasses.replace(SAMPLED, stop_token_ids=tuple(range(0, VOCAB, 2))),
}


def drafts(engine: Engine, law: Law, **options: object) -> tuple[Author, Proposal]:
    params = told_params(dataclasses.replace(SAMPLED, law=law), is_believed=True)
    author = Author(PROMPT, params, max_nodes=8)
    drafter = lm_drafter(engine, **options)
    proposal = write(drafter, author, [])
    drafter.release([author.request_id])
    assert proposal is not None
    return author, proposal


@RATIO_LAWS
def test_the_shape_follows_from_the_law_alone(noisy_engine: Engine, law: Law):
    _, proposal = drafts(noisy_engine, law)

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
    drafter.release([author.request_id])
    assert num_drafts >= 8


def test_drawn_drafts_are_kept_behind_a_commit(noisy_engine: Engine):
    drafter = lm_drafter(noisy_engine)
    params = told_params(dataclasses.replace(SAMPLED, law="rejection"), is_believed=True)
    author = Author(PROMPT, params, max_nodes=6)
    first = write(drafter, author, [])
    second = write(drafter, author, first.tree.token_ids[:2].tolist())
    drafter.release([author.request_id])
    assert second.tree.token_ids[:3].tolist() == first.tree.token_ids[2:5].tolist()


def test_a_drafter_that_is_not_believed_is_asked_for_the_likeliest_tokens():
    params = dataclasses.replace(SAMPLED, law="rejection")

    told = told_params(params, is_believed=False)

    assert (told.temperature, told.law, told.seed) == (0.0, "coupled", None)
    assert told_params(params, is_believed=True).seed not in (params.seed, None)
    assert told_params(SAMPLED, is_believed=False) is SAMPLED
