"""Models of machines and drafters: cost curves, and the growth of trees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.core import EMPTY_FLOATS, EMPTY_TREE, FloatArray, TokenTree
from cluster.simulate.texts import RecordedText
from cluster.spec.budget import Ask
from cluster.spec.step_profile import DraftTime, StepProfile
from cluster.spec.tree import prune, reroot

# The most nodes of a recorded tree.
_MAX_NODES = 32

Offer = tuple[TokenTree, FloatArray]
NOTHING: Offer = (EMPTY_TREE, EMPTY_FLOATS)


@dataclass(frozen=True, slots=True)
class Machine:
    """A target's cost curves, all in seconds.

    rows, times_s: the rows and times of steps.  told_s: the times by its profile, None = the same.
    look_up_s: the time of look-ups per round and per node; model_s: the time that a model adds.
    round_s, sequence_s: the time outside the step per round, and per sequence of it.  max_rows: the
    most rows of a step.
    """

    rows: tuple[int, ...]
    times_s: tuple[float, ...]
    look_up_s: tuple[float, float]
    model_s: tuple[float, float]
    told_s: tuple[float, ...] | None = None
    round_s: float = 0.0008
    sequence_s: float = 0.00001
    max_rows: int = 512

    @property
    def profile(self) -> StepProfile:
        """Return the profile that the target has measured before it served."""
        return _profile(self.rows, self.told_s or self.times_s)

    def step_s(self, num_rows: int, num_sequences: int) -> float:
        """Return the time of a round without drafting."""
        outside_s = self.round_s + self.sequence_s * num_sequences
        return float(_profile(self.rows, self.times_s).at([num_rows])[0]) + outside_s

    def draft_times(self, *, has_models: bool) -> list[DraftTime]:
        """Return the times of its residents, as measured before it served."""
        return [
            DraftTime(
                count, nodes, with_models,
                self.draft_s(count, Ask(nodes, with_models), has_models=has_models),
            )
            for with_models in ((False, True) if has_models else (False,))
            for count in (1, 4, 16)
            for nodes in (2, 8, 24)
        ]  # fmt: skip

    def draft_s(self, num_sequences: int, ask: Ask, *, has_models: bool) -> float:
        """Return the residents' time.  has_models: not all of them are look-ups."""
        if ask.num_nodes == 0:
            return 0.0
        kinds = (
            (self.look_up_s, self.model_s) if ask.with_models and has_models else (self.look_up_s,)
        )
        return sum(once_s + node_s * ask.num_nodes * num_sequences for once_s, node_s in kinds)


@functools.cache
def _profile(rows: tuple[int, ...], times_s: tuple[float, ...]) -> StepProfile:
    found = StepProfile.of(rows, times_s)
    assert found is not None
    return found


@dataclass(slots=True, eq=False)
class Source:
    """The complete tree of one drafter at every place of a text."""

    tree_at: Callable[[RecordedText, int], Offer]

    def best(self, text: RecordedText, position: int, num_nodes: int) -> Offer:
        tree, survival = self.tree_at(text, position)
        pruned, claimed, _ = prune(tree, survival, num_nodes)
        return pruned, claimed


def recorded(name: str) -> Source:
    """A drafter as it was recorded."""
    return Source(lambda text, position: text.trees[name].at(position))


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Drafters and the places where they run.

    models: names of those that are no look-ups.  remote: names of those on devices of their own;
    the others are residents.
    nodes_per_s: a device's speed for one text.  crowd: from so many texts on, the texts share that
    speed.  latency_s: from a commit to the first nodes after it.
    """

    sources: Mapping[str, Source]
    models: frozenset[str] = frozenset()
    remote: frozenset[str] = frozenset()
    nodes_per_s: float = 0.0
    crowd: float = 8.0
    latency_s: float = 0.002

    @property
    def residents(self) -> tuple[str, ...]:
        return tuple(name for name in self.sources if name not in self.remote)

    @property
    def has_resident_models(self) -> bool:
        return bool(self.models - self.remote)


@dataclass(slots=True, eq=False)
class Growing:
    """The tree of one drafter on a device of its own, for one text.

    kept: nodes that it had at since_s, when its root was committed.
    """

    source: Source
    rate: float
    latency_s: float
    position: int = 0
    kept: int = 0
    since_s: float = 0.0
    known: dict[int, Offer] = field(default_factory=dict)

    def num_nodes(self, now: float) -> int:
        grown = int((now - self.since_s - self.latency_s) * self.rate)
        return min(self.kept + max(grown, 0), _MAX_NODES)

    def at(self, text: RecordedText, now: float) -> Offer:
        """Return the nodes that it has grown so far."""
        count = self.num_nodes(now)
        if count == 0:
            return NOTHING
        if count not in self.known:
            self.known[count] = self.source.best(text, self.position, count)
        return self.known[count]

    def commit(self, text: RecordedText, position: int, now: float) -> None:
        """Move on to `position` of the text; nodes below the committed path are kept."""
        tree, _ = self.at(text, now)
        followed = text.token_ids[self.position : position]
        rest = reroot(tree, followed)
        self.kept = len(rest.tree) if rest.hit else 0
        self.position, self.since_s = position, now
        self.known.clear()
