"""Every drafter follows the protocol for any commits in any order."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from cluster.core import Commit, Proposal, SamplingParams, token_array
from cluster.draft.base import Drafter, DrafterContext, DraftTask
from cluster.draft.suffix import SuffixDrafter, SuffixOptions
from cluster.engine.engine import Engine
from cluster.spec.token_log import prefix_hash
from cluster.spec.tree_check import check_tree
from tests.support.choices import by_day
from tests.support.draft.author import VOCAB, Author, grow, lm_drafter, write
from tests.support.engine.integrity import check_integrity
from tests.support.spec.trees import paths

MAX_NODES = 12
MAX_REQUESTS = 2
NAMES = ("a", "b", "c")
tokens = st.lists(st.integers(4, 9), min_size=1, max_size=7)


class Conversation(RuleBasedStateMachine):
    """Requests a, b and c (one more than fits); the model is what each should hold."""

    def __init__(self):
        super().__init__()
        self.drafter = self.make()
        self.held = {}  # name -> generation, tokens
        self.sent = []

    def make(self) -> Drafter:
        raise AssertionError("each drafter's machine says how it is made")

    def commit(self, name: str, generation: int, base_len: int, text: list[int]) -> Commit:
        params = SamplingParams(
            temperature=0.0 if name == "a" else 0.8,
            seed=generation,
            max_tokens=200,
        )
        return Commit(
            name,
            generation,
            base_len,
            prefix_hash(text[:base_len]),
            token_array(text[base_len:]),
            2,
            MAX_NODES,
            name,
            params if base_len == 0 else None,
        )

    def send(self, commit: Commit):
        """Compare the drafter's answer with the protocol's rule."""
        (observation,) = self.drafter.observe([commit])
        self.sent.append(commit)
        name, known = commit.request_id, self.held.get(commit.request_id)
        assert observation.request_id == name
        if known is None:
            if commit.base_len or len(self.held) == MAX_REQUESTS:
                assert observation.have_len == 0
                return
            text = []
        else:
            generation, text = known
            stale = commit.generation < generation
            ahead = commit.base_len > len(text)
            foreign = not ahead and prefix_hash(text[: commit.base_len]) != commit.prefix_hash
            if stale or ahead or foreign:
                assert observation.have_len == (0 if foreign else len(text))
                return
        text = text[: commit.base_len] + commit.token_ids.tolist()
        self.held[name] = (commit.generation, text)
        assert observation.generation == commit.generation
        assert observation.have_len == len(text)

    @rule(name=st.sampled_from(NAMES), new=tokens)
    def append(self, name: str, new: list[int]):
        generation, text = self.held.get(name, (1, []))
        self.send(self.commit(name, generation, len(text), text + new))

    @rule(name=st.sampled_from(NAMES), slices=st.integers(1, 3), data=st.data())
    def accept_part_of_the_proposal(self, name: str, slices: int, data: st.DataObject):
        if name not in self.held:
            return
        generation, text = self.held[name]
        proposal = None
        for _ in range(slices):
            for each in self.drafter.propose([DraftTask(name, generation, MAX_NODES)]):
                proposal = each
        if proposal is None or len(proposal.tree) == 0:
            return
        path = data.draw(st.sampled_from(paths(proposal.tree)))
        self.send(self.commit(name, generation, len(text), [*text, *path, 4]))

    @rule(index=st.integers(0, 50))
    def repeat_an_old_commit(self, index: int):
        if self.sent:
            self.send(self.sent[index % len(self.sent)])

    @rule(name=st.sampled_from(NAMES), ahead=st.integers(1, 3))
    def lose_a_commit(self, name: str, ahead: int):
        generation, text = self.held.get(name, (1, []))
        self.send(self.commit(name, generation, len(text) + ahead, text + [5] * (ahead + 1)))

    @rule(name=st.sampled_from(NAMES), keep=st.integers(0, 10), new=tokens)
    def move_to_a_new_owner(self, name: str, keep: int, new: list[int]):
        if name not in self.held:
            return
        generation, text = self.held[name]
        kept = text[:keep]
        self.send(self.commit(name, generation + 1, len(kept), kept + new))

    @rule(name=st.sampled_from(NAMES), new=tokens)
    def start_another_text_under_the_name(self, name: str, new: list[int]):
        generation, _ = self.held.get(name, (1, []))
        self.send(self.commit(name, generation, 0, new))

    @rule(name=st.sampled_from(NAMES))
    def end(self, name: str):
        self.drafter.release([name, "never heard of"])
        self.held.pop(name, None)

    @rule(names=st.sets(st.sampled_from(NAMES)), slices=st.integers(1, 4))
    def grow(self, names: set[str], slices: int):
        tasks = [
            DraftTask(name, self.held[name][0] if name in self.held else 1, MAX_NODES)
            for name in sorted(names)
        ]
        for _ in range(slices):
            for proposal in self.drafter.propose(tasks):
                assert proposal.request_id in names
                self.check(proposal)

    def check(self, proposal: Proposal):
        generation, text = self.held[proposal.request_id]
        assert proposal.generation == generation
        assert proposal.base_len == len(text)
        assert proposal.prefix_hash == prefix_hash(text)
        check_tree(proposal.tree, VOCAB)
        assert len(proposal.tree) == len(proposal.survival) <= MAX_NODES
        above = np.where(proposal.tree.parents < 0, 1.0, proposal.survival[proposal.tree.parents])
        assert (proposal.survival <= above).all()
        assert (proposal.survival > 0.0).all()

    @rule()
    def grow_until_content(self):
        tasks = [DraftTask(name, held[0], MAX_NODES) for name, held in self.held.items()]
        for _ in range(200):
            proposals = self.drafter.propose(tasks)
            for proposal in proposals:
                self.check(proposal)
            if not proposals:
                return
        raise AssertionError("200 slices and still growing")

    def teardown(self):
        self.drafter.release(NAMES)
        super().teardown()


CONTEXT = DrafterContext("d", MAX_NODES, MAX_REQUESTS)
FEW = settings(max_examples=by_day(8, 60), stateful_step_count=15)
MANY = settings(max_examples=by_day(25, 250), stateful_step_count=30)


class SuffixConversation(Conversation):
    def make(self) -> Drafter:
        return SuffixDrafter(CONTEXT, SuffixOptions(min_ngram=1, max_ngram=3, max_tokens=32))


TestSuffix = SuffixConversation.TestCase
TestSuffix.settings = MANY


def test_the_lm_drafter_follows_the_protocol(noisy_engine: Engine):
    class LMConversation(Conversation):
        def make(self) -> Drafter:
            return lm_drafter(
                noisy_engine,
                MAX_NODES,
                MAX_REQUESTS,
                num_candidates=16,
                width=2,
                min_survival=0.002,
            )

        @invariant()
        def pages_are_accounted_for(self):
            check_integrity(noisy_engine)

        def teardown(self):
            super().teardown()
            assert noisy_engine.pages_in_use == 0

    run_state_machine_as_test(LMConversation, settings=FEW)


MAKERS = {
    "suffix": lambda engine: SuffixDrafter(CONTEXT, SuffixOptions()),
    "lm": lambda engine: lm_drafter(engine, MAX_NODES, MAX_REQUESTS),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_new_owner_of_the_same_text_gets_its_own_proposals(noisy_engine: Engine, kind: str):
    drafter, author = MAKERS[kind](noisy_engine), Author([5, 6, 7, 8, 5, 6, 7])
    first = write(drafter, author, [])
    assert grow(drafter, author) == {}, "the same owner has it already"
    author.generation = 2
    drafter.observe([author.commit_of(0)])
    second = grow(drafter, author)["a"]
    assert second.generation == 2
    assert second.tree.token_ids.tolist() == first.tree.token_ids.tolist()
    drafter.release(["a"])


@pytest.mark.parametrize("kind", MAKERS)
def test_new_parameters_for_the_same_text_give_another_tree(noisy_engine: Engine, kind: str):
    prompt = [3, 5, 6, 70, 4, 5, 6, 80, 9, 5, 6]
    drafter, author = MAKERS[kind](noisy_engine), Author(prompt)
    greedy = write(drafter, author, [])
    proposals = []
    for seed in range(6):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=99)
        drafter.observe([Author(prompt, params).opening()])
        proposals.append(grow(drafter, author).get("a"))
    trees = {tuple(each.survival.tolist()) for each in [greedy, *proposals] if each is not None}
    assert len(trees) > 1
    drafter.release(["a"])
