"""A control loop that is fed by hand: steps of texts whose drafts come true as far as is said."""

import numpy as np

from cluster.config.schema import CoordinatorConfig
from cluster.core import TokenTree, token_array
from cluster.plan.controller import Controller
from cluster.plan.in_flight import Moment, Plan, Round
from cluster.plan.texts import HeldTree, Resident, Text
from cluster.spec.budget import Ask
from cluster.spec.step_profile import DraftTime, StepProfile
from cluster.spec.token_log import TokenLog

GROUP = ("default", False)
STEP_S = 0.010
PROFILE = StepProfile.of((1, 16, 64), (STEP_S, STEP_S, 4 * STEP_S))
SUFFIX, LM = Resident("suffix", True), Resident("lm", False)
CLAIMED = np.array([0.9, 0.8, 0.7, 0.6], np.float32)


def text_of(name: str, task: str = "default", max_draft_tokens: int = 8, length: int = 1) -> Text:
    text = Text(name, (task, False), TokenLog(token_array([5] * length)))
    text.max_draft_tokens, text.names = max_draft_tokens, ("suffix", "lm")
    return text


class Played:
    """A target with residents and a text.

    depth: so many tokens of a chain are right.  claimed: the survivals of its nodes.
    """

    residents: tuple[Resident, ...] = (LM,)

    def __init__(self, *, depth: int = 8, **settings: object) -> None:
        config = CoordinatorConfig(max_draft_tokens=8, **settings)
        self.controller = Controller(config, PROFILE)
        self.texts = [text_of("r0")]
        self.now, self.depth, self.claimed = 0.0, depth, CLAIMED

    @property
    def text(self) -> Text:
        return self.texts[0]

    def plan(self) -> Plan:
        moment = Moment(self.now, self.residents)
        return self.controller.plan(self.texts, [100] * len(self.texts), None, moment)

    def round(self, *, draft_s: float = 0.001) -> Plan:
        """Make a step of all texts; each then has a new tree if drafts were asked for."""
        plan = self.plan()
        counts = [len(item.tree) for item in plan.in_flight]
        assert not (plan.why and any(counts)), "there is a reason only where nothing is verified"
        for text, count in zip(self.texts, counts, strict=True):
            accepted = min(count, self.depth)
            last = 1 if accepted < self.depth and accepted == count else 9
            text.tokens.append(token_array([1] * accepted + [last]))
            text.held.clear()
            if plan.ask.num_nodes:
                self.draft(text, plan.ask)
        turns = self.turns(plan.ask, draft_s) if plan.ask.num_nodes else []
        spent_s = sum(turn.time_s for turn in turns)
        self.now += STEP_S + spent_s
        gained = [1 + min(count, self.depth) for count in counts]
        done = Round(self.texts, gained, sum(counts), STEP_S, spent_s, turns)
        self.controller.learn(done)
        self.controller.scores.score(self.texts)
        return plan

    def draft(self, text: Text, ask: Ask) -> None:
        self.hold(text, "lm", ask.num_nodes)

    def hold(self, text: Text, name: str, most: int, *, is_look_up: bool = False) -> None:
        base_len, size = len(text.tokens), min(most, len(self.claimed))
        tree = TokenTree.chain(([1] * self.depth + [2] * 8)[:size])
        text.held[name] = HeldTree(
            base_len,
            base_len,
            tree,
            self.claimed[:size],
            is_resident=True,
            is_look_up=is_look_up,
        )

    def turns(self, ask: Ask, draft_s: float) -> list[DraftTime]:
        return [DraftTime(len(self.texts), ask.num_nodes, "lm", False, draft_s)]

    def run(self, num_rounds: int, *, draft_s: float = 0.001) -> list[Plan]:
        return [self.round(draft_s=draft_s) for _ in range(num_rounds)]

    def first_ask(self) -> tuple[int, frozenset[str]]:
        """Return the nodes that are asked for behind the prompt, and of whom."""
        self.controller.first_ask(self.text, Moment(self.now, self.residents))
        return self.text.ask.num_nodes, self.text.asked or frozenset()

    def verified(self, num_rounds: int) -> list[int]:
        """The nodes that each step verifies for the first text."""
        return [len(plan.in_flight[0].tree) for plan in self.run(num_rounds)]
