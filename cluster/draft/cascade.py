"""Drafters in stages: a look-up or a small model drafts, a larger one judges and goes on.

Chen et al., "Cascade Speculative Drafting" (2023); Sun et al., "TriForce" (2024).  A model that
grows a tree of depth d makes d passes; one that judges a tree makes one.  And what the first stage
is sure of costs the next ones nothing.

A stage that raises or lies is passed over, and left alone for a while by a breaker of its own.
One that stalls lets the whole cascade rest: a stage does not know how long a step may take.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from cluster.config.processes import CoordinatorConfig
from cluster.core import Clock, Commit, Observation, Proposal
from cluster.draft.base import Drafter, DrafterContext, DraftTask, Grafting
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.committed_text import CommittedTextDrafter, RequestState
from cluster.draft.inside import StepRows
from cluster.draft.options import CascadeOptions
from cluster.draft.runner import Runner
from cluster.models.made_for import MadeFor, made_for_of
from cluster.rpc.messages import Refusal


@dataclass(slots=True, eq=False)
class CascadeRequest(RequestState):
    """stage: that drafts for the text, their number = none any more.  best: the newest tree with
    nodes."""

    stage: int = 0
    best: Proposal | None = None


class Stage(Runner):
    """One drafter of a cascade, contained."""

    def __init__(self, name: str, drafter: Drafter, clock: Clock) -> None:
        limits = CoordinatorConfig()
        super().__init__(
            drafter, name, CircuitBreaker(limits.breaker_failures, limits.breaker_reset_s), clock
        )

    def follow(self, texts: Sequence[tuple[RequestState, int]]) -> list[Refusal]:
        """See `Runner`; nothing is said to one that is left alone, or of texts that it holds."""
        short = [each for each in texts if not self.holds(each[0])]
        return super().follow(short) if self.breaker.allows(self._clock()) else []

    def trees(self, asked: Sequence[tuple[CascadeRequest, int]]) -> dict[str, Proposal]:
        """Its trees after one slice, of the texts that it holds."""
        held = [each for each in asked if self.holds(each[0])]
        if not (held and self.breaker.allows(self._clock())):
            return {}
        # It is not told again of these: that would count as a success, and resume what was
        # interrupted.
        self.growing.clear()
        for request, num_nodes in held:
            self._want(request.request_id, request.generation, num_nodes)
        proposals, _ = self.grow({each.request_id: each.text for each, _ in held})
        return {each.request_id: each for each in proposals}

    def graft(self, tree: Proposal) -> None:
        """Let it judge this tree, if it can judge another one's."""
        judge = self._drafter
        if isinstance(judge, Grafting):
            self._try("graft", lambda: judge.graft([tree]), fault="refused")


class CascadeDrafter(CommittedTextDrafter[CascadeRequest]):
    """See `Drafter` and `StepReader`.  A slice of growth is one of each stage that has texts."""

    def __init__(
        self,
        context: DrafterContext,
        options: CascadeOptions,
        clock: Clock = time.perf_counter,
    ) -> None:
        super().__init__(context, CascadeRequest.opened_by)
        self.stages = [Stage(name, context.stages[name], clock) for name in options.stages]
        self._thresholds = options.hands_over_below
        self._max_graft = options.max_graft
        drafters = [context.stages[name] for name in options.stages]
        self.is_look_up = all(getattr(each, "is_look_up", False) for each in drafters)
        self.wants = reduce(operator.or_, (each.wants for each in self.stages))
        # What a worker says of a drafter's model is said of the first stage that has one.
        model = next((each for each in drafters if getattr(each, "engine", None) is not None), None)
        self.engine: object = getattr(model, "engine", None)
        self.tokenizer_hash: str = getattr(model, "tokenizer_hash", "")
        self.vocab_size: int = getattr(model, "vocab_size", 0)
        known = (each for each in map(made_for_of, drafters) if each != MadeFor())
        self.made_for = next(known, MadeFor())

    @property
    def pages_in_use(self) -> int:
        return sum(stage.pages[0] for stage in self.stages)

    @property
    def pages_total(self) -> int:
        return sum(stage.pages[1] for stage in self.stages)

    def interrupt(self) -> None:
        """See `Interruptible`."""
        for stage in self.stages:
            stage.interrupt()

    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`."""
        for stage in self.stages:
            stage.read([each.seen_by(stage.wants, self.wants) for each in rows])

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        """See `Drafter.observe`."""
        observations = super().observe(commits)
        told = [self._requests.find(each.request_id) for each in commits]
        known = {id(each): (each, 0) for each in told if each is not None}
        for stage in self.stages:
            stage.follow(list(known.values()))
        return observations

    def _forget_tree(self, request: CascadeRequest) -> None:
        """The first stage drafts again."""
        request.stage, request.best = 0, None

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`.  A text goes from stage to stage until one is sure of its tree."""
        asked, end = self._asked(tasks), len(self.stages)
        found: dict[str, Proposal] = {}
        for index, stage in enumerate(self.stages):
            own = [each for each in asked if each[0].stage == index]
            trees = stage.trees(own)
            for request, _ in own:
                name = request.request_id
                tree = trees.get(name)
                if tree is not None and len(tree.tree):
                    request.best = tree
                # A text that is left out while others' trees grow waits for its turn.
                waits = trees and stage.holds(request)
                if not waits if tree is None else tree.is_complete:
                    request.stage = self._next(index, request)
                best, is_over = request.best or tree, request.stage == end
                if best is not None and (tree is not None or is_over):
                    found[name] = replace(best, drafter=self._name, is_complete=is_over)
        return list(found.values())

    def _next(self, index: int, request: CascadeRequest) -> int:
        """The stage after this one, to which the text is left; none where this one is sure."""
        best = request.best
        if best is None:
            return index + 1
        if float(best.survival.max()) >= self._thresholds[index]:
            return len(self.stages)
        self.stages[index + 1].graft(replace(best, tree=best.tree.first(self._max_graft)))
        return index + 1

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`."""
        super().release(request_ids)
        for stage in self.stages:
            stage.release(request_ids)
