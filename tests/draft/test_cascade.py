"""A cascade on toy stages: who drafts, who judges, and what a stage's failure costs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.config.references import check
from cluster.config.schema import (
    Config,
    DrafterConfig,
    DrafterPlacement,
    EngineConfig,
    TargetConfig,
)
from cluster.core import Commit, Observation, Proposal, TokenTree
from cluster.draft import registry
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.cascade import CascadeDrafter
from cluster.draft.options import CascadeOptions
from cluster.draft.plugin import Draft, RequestState, TextDrafter
from tests.support.clock import FakeClock
from tests.support.draft.author import Author, grow, write
from tests.support.errors import config_error


class Chain(TextDrafter):
    """Drafts the same chain behind every text."""

    is_look_up = True

    def __init__(self, name: str, tokens: Sequence[int], first: float) -> None:
        super().__init__(DrafterContext(name, 16, 8), None)
        self._tokens, self._first = list(tokens), first
        self.num_drafts = 0
        self.fails = False

    def draft(self, request: RequestState, max_nodes: int) -> Draft | None:
        self.num_drafts += 1
        if self.fails:
            raise RuntimeError("a stage's own mistake")
        tree = TokenTree.chain(self._tokens[:max_nodes])
        return Draft(tree, self._first * 0.9 ** np.arange(len(tree), dtype=np.float32))


class Judge(Chain):
    """Keeps the nodes of a graft that are in its own chain."""

    is_look_up = False

    def __init__(self, name: str, tokens: Sequence[int], first: float) -> None:
        super().__init__(name, tokens, first)
        self.grafts = []

    def graft(self, trees: Sequence[Proposal]) -> None:
        if self.fails:
            raise RuntimeError("a stage's own mistake")
        self.grafts += [each.tree.token_ids.tolist() for each in trees]


def cascade_of(*stages: Chain, **options: Any) -> CascadeDrafter:
    named = {stage.context.name: stage for stage in stages}
    context = DrafterContext("cascade", 16, 8, stages=named)
    return CascadeDrafter(context, CascadeOptions(tuple(named), **options), FakeClock())


@pytest.mark.parametrize(
    ("survival", "tokens", "grafts"),
    [(0.9, [5, 6, 7, 8], []), (0.4, [1, 2], [[5, 6, 7]])],
    ids=["sure", "unsure"],
)
def test_a_stage_below_its_threshold_hands_its_tree_to_the_next_one(
    survival: float, tokens: list[int], grafts: list[list[int]]
):
    first, model = Chain("first", [5, 6, 7, 8], survival), Judge("model", [1, 2], 0.3)
    proposal = write(cascade_of(first, model, max_graft=3), Author([3, 4]), [])
    assert proposal.tree.token_ids.tolist() == tokens
    assert (proposal.drafter, proposal.is_complete) == ("cascade", True)
    assert (model.num_drafts, model.grafts) == (len(grafts), grafts)


def test_texts_go_through_three_stages():
    stages = Chain("a", [5], 0.1), Judge("b", [6], 0.3), Judge("c", [7], 0.2)
    drafter = cascade_of(*stages, thresholds=(0.2, 0.4))
    assert write(drafter, Author([3, 4]), []) is not None
    assert [stage.num_drafts for stage in stages] == [1, 1, 1]
    assert stages[2].grafts == [[6]]
    assert not drafter.is_look_up


def test_the_next_commit_begins_at_the_first_stage_again():
    unsure, model = Chain("unsure", [5], 0.4), Judge("model", [1], 0.9)
    drafter, author = cascade_of(unsure, model), Author([3, 4])
    for tokens in ([], [5], [6, 7]):
        proposal = write(drafter, author, tokens)
        assert (proposal.base_len, proposal.tree.token_ids.tolist()) == (len(author.tokens), [1])
    assert (unsure.num_drafts, model.num_drafts) == (3, 3)


class Deaf(Chain):
    """Cannot be told of one text, beside which another one goes well."""

    def observe(self, commits: Sequence[Commit]) -> list[Observation]:
        if any(commit.request_id == "b" for commit in commits):
            raise RuntimeError("a stage's own mistake")
        return super().observe(commits)


class Dumb(Chain):
    """Cannot draft for it."""

    def draft(self, request: RequestState, max_nodes: int) -> Draft | None:
        self.fails = request.request_id == "b"
        return super().draft(request, max_nodes)


class Slow(Chain):
    """Drafts for one text in a slice, as a model does for those whose drafts came true first."""

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        return super().propose(tasks[:1])


@pytest.mark.parametrize(
    ("kind", "first", "last", "num_faults"),
    [(Deaf, [5, 1], [1, 1], 3), (Dumb, [5, 1], [1, 1], 3), (Slow, [5, 5], [5, 5], 0)],
)
def test_a_stage_that_fails_for_one_of_two_texts_is_passed_over_and_left_alone_for_a_while(
    kind: type[Chain], first: list[int], last: list[int], num_faults: int
):
    drafter = cascade_of(kind("first", [5], 0.9), Judge("model", [1], 0.9))
    authors, drafts = (Author([3, 4]), Author([6, 7], request_id="b")), []
    for position in range(8):
        drafter.observe([author.commit([position]) for author in authors])
        trees = grow(drafter, *authors)
        drafts.append([trees[name].tree.token_ids for name in "ab"])
    assert (drafts[0], drafts[-1]) == (first, last)
    assert [stage.breaker.faults["refused"] for stage in drafter.stages] == [num_faults, 0]


def test_what_a_broken_last_stage_should_have_judged_is_drafted_as_it_is():
    unsure, broken = Chain("unsure", [5, 6], 0.4), Judge("broken", [1], 0.9)
    broken.fails = True
    proposal = write(cascade_of(unsure, broken), Author([3, 4]), [])
    assert proposal.tree.token_ids.tolist() == [5, 6]


def test_a_released_text_is_forgotten_by_all_stages():
    drafter = cascade_of(Chain("a", [5], 0.4), Judge("b", [6], 0.9))
    author = Author([3, 4])
    write(drafter, author, [])
    drafter.release(["a"])
    assert drafter.propose([author.task()]) == []
    (observation,) = drafter.observe([author.commit([5])])
    assert observation.have_len == 0
    assert all(not stage.held for stage in drafter.stages)


def test_a_stage_that_lost_a_text_is_sent_all_of_it():
    first, model = Chain("first", [5], 0.4), Judge("model", [1], 0.9)
    drafter, author = cascade_of(first, model), Author([3, 4])
    write(drafter, author, [])
    model.release(["a"])
    for tokens in ([7], [8]):
        proposal = write(drafter, author, tokens)
    assert proposal.tree.token_ids.tolist() == [1]


def test_a_text_that_is_cut_and_goes_on_otherwise_is_drafted_anew():
    drafter = cascade_of(Chain("a", [5], 0.4), Judge("b", [6], 0.9))
    author = Author([3, 4, 9, 9])
    write(drafter, author, [])
    author.tokens = author.tokens[:2]
    drafter.observe([replace(author.commit([8]), prompt_len=2)])
    assert drafter.propose([author.task()])[-1].base_len == 3


LM = DrafterConfig(kind="lm")


def config_of(stages: Sequence[str], **more: DrafterConfig) -> Config:
    drafters = {
        "suffix": DrafterConfig(kind="suffix"),
        "recycling": DrafterConfig(kind="token_recycling"),
    }
    cascade = DrafterConfig(kind="cascade", options={"stages": list(stages)})
    target = TargetConfig(engine=EngineConfig(model="demo"))
    return Config(target=target, drafters={**drafters, "cascade": cascade, **more})


def test_stages_run_in_their_cascade_alone():
    config = config_of(["suffix", "lm"], lm=LM)
    check(config)
    assert config.residents == ("recycling", "cascade")
    assert config.hosted == ("recycling", "suffix", "lm")
    assert config.drafters_of("default") == ("recycling", "cascade")
    assert config.pool == ()


def test_a_cascade_is_built_with_the_stages_that_it_names():
    config = config_of(["suffix", "recycling"])
    drafter = registry.build(
        "cascade", config.drafters, lambda name: DrafterContext(name, 16, 8, target=object())
    )
    assert isinstance(drafter, CascadeDrafter)
    assert drafter.is_look_up
    assert drafter.wants.num_top > 0, "what a stage reads of the target's steps"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of(["suffix", "lmm"], lm=LM), "no drafter is named 'lmm' .did you mean lm"),
        (config_of(["suffix", "cascade"]), "'cascade' is a cascade"),
        (
            config_of(
                ["suffix", "recycling"],
                second=DrafterConfig(kind="cascade", options={"stages": ["suffix", "lm"]}),
                lm=LM,
            ),
            "is a stage of 'second' already",
        ),
        (
            replace(config_of(["suffix", "recycling"]), tasks={"default": ("suffix",)}),
            "'suffix' is a stage of 'cascade'; name that one",
        ),
        (
            config_of(["suffix", "lm"], lm=replace(LM, placement=DrafterPlacement(num_cpus=1.0))),
            "drafters.lm.placement",
        ),
    ],
)
def test_stages_that_cannot_be_are_named(config: Config, reason: str):
    with config_error(reason):
        check(config)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stages": ["lm"]}, "name two drafters or more"),
        ({"stages": ["lm", "lm"]}, "each of them once"),
        ({"stages": ["a", "b", "c"], "thresholds": [0.5]}, "2 stages before the last one"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: Any, reason: str):
    with config_error(reason):
        registry.check("cascade", DrafterConfig(kind="cascade", options=options))
