"""Speculation never costs more than it has earned, and a little more: the theorem, as a test."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.spec.budget import BudgetController
from cluster.spec.drafts import BudgetRules, SequenceDraft, Share
from cluster.spec.goodput import GoodputModel
from cluster.spec.guard import DeficitGuard

RULES = BudgetRules(max_draft_tokens=8, probe_interval=32, max_slowdown=0.02, slack_steps=8.0)


@dataclass
class Account:
    """What the rounds of a simulation took, and what they would have taken without drafts."""

    total_s: float = 0.0
    plain_s: float = 0.0
    worst_stretch_s: float = 0.0  # largest loss beyond the slowdown, over all stretches of rounds
    overshoot_s: float = 0.0
    step_s: float = 0.0  # the slowest plain step

    def enter(self, time_s: float, plain_s: float, expected_s: float, slowdown: float) -> None:
        self.total_s += time_s
        self.plain_s += plain_s
        self._loss_s = max(self._loss_s, 0.0) + time_s - (1.0 + slowdown) * plain_s
        self.worst_stretch_s = max(self.worst_stretch_s, self._loss_s)
        self.overshoot_s = max(self.overshoot_s, time_s - expected_s)

    _loss_s: float = 0.0


@dataclass(frozen=True)
class World:
    """A target and drafters that do their worst: all of it changes at random, at random times.

    honesty: share of the claimed survival that drafts really have.
    """

    seed: int
    num_sequences: int
    honesty: float
    jump_rate: float
    plain_jumps: bool
    noise: float = 0.1

    def run(self, rules: BudgetRules, num_rounds: int = 500) -> Account:
        generator = np.random.default_rng(self.seed)
        controller = BudgetController(rules)
        account = Account()
        plain_s, node_cost = 0.010, 0.05
        for _ in range(num_rounds):
            if generator.random() < self.jump_rate:
                node_cost = float(generator.choice([0.0, 0.05, 0.3, 1.5]))
                if self.plain_jumps:
                    plain_s = float(generator.choice([0.005, 0.010, 0.030]))
            claims = [
                generator.uniform(0.2, 1.0) ** np.arange(1, 9) for _ in range(self.num_sequences)
            ]
            drafts = [SequenceDraft(claim.astype(np.float32)) for claim in claims]
            chosen = controller.choose(drafts).nodes
            num_nodes = sum(len(nodes) for nodes in chosen)
            expected_s = controller.high(self.num_sequences, num_nodes) or 0.0
            time_s = plain_s
            if num_nodes:
                extra = node_cost * num_nodes / self.num_sequences
                time_s *= 1.0 + extra + self.noise * generator.random()
            shares = [
                Share(len(nodes), 1 + self._accepted(generator, claim, len(nodes)))
                for nodes, claim in zip(chosen, claims, strict=True)
            ]
            step_s = controller.estimate(self.num_sequences, 0) if num_nodes else time_s
            assert step_s is not None
            controller.settle(shares, time_s)
            controller.record(self.num_sequences, num_nodes, time_s)
            if num_nodes and not self.plain_jumps:
                assert step_s <= plain_s * (1.0 + 1e-9), "nothing is credited beyond a plain step"
            num_tokens = sum(share.num_tokens for share in shares)
            equivalent_s = step_s * num_tokens / self.num_sequences
            expected_s = expected_s if num_nodes else time_s
            account.enter(time_s, equivalent_s, expected_s, rules.max_slowdown)
            account.step_s = max(account.step_s, step_s)
        return account

    def _accepted(self, generator: np.random.Generator, claim: np.ndarray, num_nodes: int) -> int:
        conditionals = np.concatenate(([claim[0]], claim[1:] / claim[:-1]))[:num_nodes]
        accepted = generator.random(num_nodes) < self.honesty * conditionals
        return num_nodes if accepted.all() else int(np.argmin(accepted))


WORLDS = st.builds(
    World,
    seed=st.integers(0, 10**6),
    num_sequences=st.sampled_from([1, 3, 16]),
    honesty=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    jump_rate=st.sampled_from([0.0, 0.01, 0.1]),
    plain_jumps=st.booleans(),
)


def bound_s(account: Account, rules: BudgetRules) -> float:
    return rules.slack_steps * account.step_s + account.overshoot_s + 1e-9


@given(WORLDS)
@settings(deadline=None, max_examples=40)
def test_total_time_is_at_most_plain_time_and_its_share_and_the_allowance(world: World) -> None:
    account = world.run(RULES)

    allowed_s = (1.0 + RULES.max_slowdown) * account.plain_s + bound_s(account, RULES)
    assert account.total_s <= allowed_s


@given(WORLDS)
@settings(deadline=None, max_examples=40)
def test_the_bound_holds_over_every_stretch_of_rounds(world: World) -> None:
    """Gains of the past are not saved up to be lost later."""
    account = world.run(RULES)

    assert account.worst_stretch_s <= bound_s(account, RULES)


def test_without_the_guard_lying_drafters_break_the_bound() -> None:
    liars = World(seed=1, num_sequences=1, honesty=0.0, jump_rate=0.0, plain_jumps=False)
    unguarded = dataclasses.replace(RULES, slack_steps=1e9)

    account = liars.run(unguarded)

    assert account.total_s > (1.0 + RULES.max_slowdown) * account.plain_s + bound_s(account, RULES)
    guarded = liars.run(RULES)
    assert guarded.total_s < account.total_s


def test_honest_drafts_that_pay_are_not_refused() -> None:
    honest = World(seed=2, num_sequences=1, honesty=1.0, jump_rate=0.0, plain_jumps=False)

    account = honest.run(RULES)

    assert account.total_s < 0.7 * account.plain_s


def test_a_request_whose_drafts_fail_pays_its_own_allowance_and_is_probed_now_and_then() -> None:
    controller = BudgetController(RULES)
    claim = np.float32(0.9) ** np.arange(1, 9, dtype=np.float32)
    guards = [DeficitGuard(RULES.max_slowdown, RULES.slack_steps) for _ in range(2)]
    counts: list[list[int]] = []
    for _ in range(1500):
        drafts = [SequenceDraft(claim, guard=guard) for guard in guards]
        chosen = [len(nodes) for nodes in controller.choose(drafts).nodes]
        time_s = 0.010 * (1.0 + 0.06 * sum(chosen))
        # The first one's drafts are all accepted, the second one's never.
        shares = [Share(chosen[0], 1 + chosen[0], guards[0]), Share(chosen[1], 1, guards[1])]
        controller.settle(shares, time_s)
        controller.record(2, sum(chosen), time_s)
        counts.append(chosen)

    late = np.array(counts[500:])
    assert late[:, 0].mean() > 6.0
    assert 0.0 < late[:, 1].mean() < 0.5


def test_an_account_allows_nothing_that_it_could_not_lose() -> None:
    guard = DeficitGuard(slowdown=0.1, slack_steps=2.0)
    assert guard.allows(0.02, 0.01)
    assert not guard.allows(0.021, 0.01)
    guard.settle(time_s=0.03, plain_s=0.01, step_s=0.01)
    assert guard.deficit_s == pytest.approx(0.019)
    assert not guard.allows(0.002, 0.01)
    for _ in range(19):
        guard.settle(time_s=0.01, plain_s=0.01, step_s=0.01)
    assert guard.allows(0.0199, 0.01)
    guard.settle(time_s=0.01, plain_s=1.0, step_s=0.01)
    assert guard.deficit_s == 0.0
    assert not guard.allows(0.03, 0.01), "gains are not saved up"


def test_what_a_crowd_has_lost_does_not_hold_back_a_lone_request() -> None:
    controller = BudgetController(RULES)
    for _ in range(20):
        for sequences, nodes, time_s in ((1, 0, 0.01), (1, 4, 0.011), (16, 0, 0.05), (16, 64, 0.1)):
            controller.record(sequences, nodes, time_s)
    lost = [Share(num_tokens=1, num_nodes=4) for _ in range(16)]
    for _ in range(20):
        controller.settle(lost, 0.1)
    survival = np.array([0.9, 0.8, 0.7, 0.6], dtype=np.float32)
    crowd = [SequenceDraft(survival, max_nodes=4) for _ in range(16)]
    alone = [SequenceDraft(survival, max_nodes=4)]
    assert controller.deficit_s > 0.5
    assert not any(len(nodes) for nodes in controller.choose(crowd).nodes)
    assert any(len(controller.choose(alone).nodes[0]) for _ in range(4))


def test_a_crowd_may_lose_fewer_of_its_longer_steps() -> None:
    model = GoodputModel(dataclasses.replace(RULES, slack_steps=8.0))
    for num_sequences, step_s, allowance_s in ((1, 0.01, 0.08), (16, 0.05, 0.1)):
        guard = model.guard(num_sequences)
        assert guard.allows(allowance_s, step_s)
        assert not guard.allows(1.01 * allowance_s, step_s)


# ---- One account by hand: an eighth slower for good, two steps of half a second of allowance.


def test_before_the_first_round_the_allowance_is_what_may_be_lost() -> None:
    guard = DeficitGuard(slowdown=0.125, slack_steps=2.0)
    assert (guard.deficit_s, guard.is_exhausted) == (0.0, False)
    assert guard.allows(1.0, 0.5)
    assert not guard.allows(1.01, 0.5)
    assert guard.allows(-1.0, 0.0)  # a round that saves time needs no balance


def test_a_loss_is_charged_and_a_gain_is_saved_up_to_the_allowance() -> None:
    guard = DeficitGuard(slowdown=0.125, slack_steps=2.0)
    guard.settle(time_s=1.5, plain_s=0.8, step_s=0.5)  # 0.9 would have been its due
    assert guard.deficit_s == pytest.approx(0.6)
    assert guard.allows(0.4 - 1e-9, 9.0)
    assert not guard.allows(0.4 + 1e-9, 9.0)  # what counts is the balance, not the step
    guard.settle(time_s=0.5, plain_s=0.8, step_s=0.5)
    assert guard.deficit_s == pytest.approx(0.2)
    guard.settle(time_s=0.5, plain_s=8.0, step_s=0.5)
    assert guard.deficit_s == 0.0
    assert not guard.is_exhausted


def test_nothing_is_left_when_the_balance_is_zero() -> None:
    guard = DeficitGuard(slowdown=0.0, slack_steps=2.0)
    guard.settle(time_s=1.0, plain_s=0.0, step_s=0.5)
    assert guard.is_exhausted
    assert guard.allows(0.0, 0.5)
    assert guard.allows(-0.5, 0.5)
    assert not guard.allows(0.01, 0.5)


def test_a_plain_round_takes_what_is_left_and_no_more() -> None:
    guard = DeficitGuard(slowdown=0.0, slack_steps=2.0)
    guard.settle(time_s=1.25, plain_s=0.5, step_s=0.5, is_plain=True)
    assert guard.deficit_s == pytest.approx(0.75)
    guard.settle(time_s=3.0, plain_s=0.5, step_s=0.5, is_plain=True)
    assert guard.deficit_s == pytest.approx(1.0)
    guard.settle(time_s=2.0, plain_s=0.5, step_s=0.5)  # a speculative one goes below zero
    assert guard.deficit_s == pytest.approx(2.5)
    guard.settle(time_s=2.0, plain_s=0.5, step_s=0.5, is_plain=True)
    assert guard.deficit_s == pytest.approx(2.5)  # and a plain one leaves it there
    guard.settle(time_s=0.25, plain_s=0.5, step_s=0.5, is_plain=True)
    assert guard.deficit_s == pytest.approx(2.25)


def test_the_allowance_follows_the_step() -> None:
    guard = DeficitGuard(slowdown=0.0, slack_steps=2.0)
    guard.settle(time_s=0.5, plain_s=0.5, step_s=0.5)
    assert guard.deficit_s == 0.0
    guard.settle(time_s=0.5, plain_s=0.5, step_s=0.25)
    assert guard.deficit_s == 0.0  # cut at the smaller allowance
    guard.settle(time_s=0.5, plain_s=0.5, step_s=1.0)
    assert guard.deficit_s == pytest.approx(1.5)
